"""A server over the tests' engine, and clients of it."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api import MODEL, listening
from browser import BROWSER, PHONE, WATCH_ANSWER, WIDE

from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.serving.scheduler import ServingConfig


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])  # containers run as root
        yield browser
        browser.close()


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A page of a browser in which no script fails and nothing is blocked."""
    width, height = request.param
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.add_init_script(WATCH_ANSWER)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
        page.expected_faults = 0
        yield page
        assert len(faults) == page.expected_faults, faults
