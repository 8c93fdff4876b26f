"""A server over the tests' engine, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from api import MODEL, listening

from cacheblend.service import Engine
from cacheblend.service.http import HttpConfig, Server
from cacheblend.service.serving import ServingConfig


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    http = HttpConfig(served_model_name=MODEL, max_body_bytes=20_000, max_documents=5)
    with Server(engine.config, ServingConfig(max_num_seqs=4), http, engine=engine) as server:
        yield server


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    with listening(server) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client
