"""Uploads that have not ended: listed with stage and share, to their tenant alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import MODEL, listening
from engines import CHUNK_TOKENS, DOCUMENTS
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.retriever import RetrieverConfig
from cacheblend.service import EngineConfig
from cacheblend.service.http.auth import TenantConfig, hash_key
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.ingests import Ingest, RunningIngests
from cacheblend.service.http.server import Server


@pytest.mark.parametrize("route", ["documents", "files"])
def test_an_upload_is_listed_to_its_tenant(
    route: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an upload runs its chunks are counted for its tenant, and for no other; afterwards nothing is listed."""
    tenants = [TenantConfig(name=name, api_key_sha256=(hash_key(f"cb-{name}"),)) for name in ("one", "two")]
    config = EngineConfig(model=str(model_dir), store_dir=tmp_path, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    http, going_on = HttpConfig(served_model_name=MODEL), threading.Event()
    one, two = ({"Authorization": f"Bearer cb-{name}"} for name in ("one", "two"))
    text = str(DOCUMENTS[0]["text"])
    with (
        Server(config, http=http, tenants=tenants, embedder=FakeEmbedder()) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(1) as other,
    ):
        store, stored = server.engines["one"].store, list[object]()
        put = store.put

        def hold(*arguments: Any, **options: Any) -> Any:
            stored.append(arguments)
            if len(stored) == 2:
                going_on.wait(60)
            return put(*arguments, **options)

        monkeypatch.setattr(store, "put", hold)
        if route == "documents":
            body: dict[str, Any] = {"json": {"documents": [{"id": "for.txt", "text": text}]}}
        else:
            body = {"files": {"file": ("for.txt", text.encode())}, "data": {"purpose": "assistants"}}
        upload = other.submit(client.post, f"/v1/{route}", headers=one, **body)

        def listed(headers: dict[str, str]) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get("/v1/ingests", headers=headers).raise_for_status().json()["data"]
            return found

        try:
            wait_until(lambda: [(ingest["stage"], ingest["done"]) for ingest in listed(one)] == [("precompute", 1)])
            (ingest,) = listed(one)
            assert (ingest["object"], ingest["name"]) == ("ingest", "for.txt")
            assert listed(two) == []
        finally:
            going_on.set()
        assert upload.result().is_success
        assert listed(one) == []
        assert ingest["total"] == len(server.engines["one"].retriever.chunks())


def test_what_ends_is_not_listed() -> None:
    """An upload that failed is gone, and a thread that still reports it brings it back no more."""
    running = RunningIngests()
    with suppress(ValueError), running.follow("one", "a" * 1000) as report:
        report("index", 1, 2)
        assert running.of("one") == [Ingest("a" * 200, "index", 1, 2)]
        raise ValueError
    report("index", 2, 2)
    assert running.of("one") == []
