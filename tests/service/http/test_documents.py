"""Uploads, lists and deletions: what is told to whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import MODEL, serving
from engines import DOCUMENTS, OpenEngine
from waiting import wait_until

from cacheblend.base.errors import StoreFullError
from cacheblend.service import Engine
from cacheblend.service.serving.config import ServingConfig
from cacheblend.store import ChunkKV
from cacheblend.store.entry_file import write_files


def test_pages(client: httpx.Client) -> None:
    """A list comes in pages like OpenAI's, each telling whether more follow and after which id."""
    ids, after = [], {}
    while True:
        page = client.get("/v1/documents", params={"limit": 2, **after}).raise_for_status().json()
        assert page["object"] == "list"
        own = [document["id"] for document in page["data"]]
        assert (page["first_id"], page["last_id"]) == (own[0], own[-1])
        ids += own
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert ids == [document["id"] for document in DOCUMENTS]
    whole = client.get("/v1/documents").json()
    assert ([document["id"] for document in whole["data"]], whole["has_more"]) == (ids, False)
    nothing = client.get("/v1/documents", params={"after": ids[-1]}).json()
    assert nothing == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_files(client: httpx.Client) -> None:
    """By file, pages are one document, whose name pins and deletes them."""
    pages = [{"id": f"r.pdf#page={page}", "text": f"page {page}"} for page in (1, 2)]
    client.post("/v1/documents", json={"documents": pages}).raise_for_status()
    listed = client.get("/v1/documents", params={"by": "file"}).json()
    assert [document["id"] for document in listed["data"]] == [*(document["id"] for document in DOCUMENTS), "r.pdf"]
    assert listed["data"][-1]["parts"] == 2
    shown = client.get("/v1/documents/r.pdf").json()
    assert [chunk["document_id"] for chunk in shown["content"]] == [page["id"] for page in pages]
    assert client.post("/v1/documents/r.pdf/pin", json={"pinned": True}).json()["pinned"]
    assert client.delete("/v1/documents/r.pdf").json()["deleted"]
    assert client.delete("/v1/documents/r.pdf").status_code == 404


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after": "nothing"}, {"by": "x"}])
def test_bad_pages(client: httpx.Client, params: dict[str, object]) -> None:
    """A page that there is not is refused, with the parameter's name."""
    response = client.get("/v1/documents", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(params))


def test_deleted_while_its_upload_computes(client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload whose document is deleted meanwhile gets 409, and leaves nothing of it."""
    before = engine.store.stats().nvme.entries
    engine.ingest([{"id": "late", "text": "what was there before"}])
    precompute_documents = engine.fusor.precompute_documents
    computing, deleted = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        for kv in precompute_documents(*arguments, **options):
            yield kv
            computing.set()
            deleted.wait(60)

    monkeypatch.setattr(engine.fusor, "precompute_documents", slow)
    answers: list[httpx.Response] = []

    def upload() -> None:
        answers.append(client.put("/v1/documents/late", json={"text": str(DOCUMENTS[0]["text"])[::-1]}))

    thread = threading.Thread(target=upload)
    thread.start()
    assert computing.wait(60)
    engine.documents.delete("late")
    deleted.set()
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "document_changed")
    assert client.get("/v1/documents/late").status_code == 404
    assert engine.store.stats().nvme.entries == before


def test_a_full_disk_is_told_to_whom_it_belongs(client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that has no room gets 507; one that had room beside it gets 201, though it asks last."""
    text = {name: f"a text of {name} alone" for name in ("big", "small")}
    write = write_files

    def full(files: Any) -> None:
        names = {file.final.name for file in files}
        if names & big:
            raise StoreFullError("no room for this one")
        write(files)

    engine.ingest([{"id": "big", "text": text["big"]}])
    big = {path.name for path in (Path(engine.config.store_dir) / "kv" / "entries").rglob("*") if path.is_file()}
    big -= {str(entry.key) for entry in engine.store.ls()[:-1]}
    engine.documents.delete("big")
    monkeypatch.setattr("cacheblend.store.nvme_tier.write_files", full)
    with engine.store.exclusive():  # both wait to be written together
        answers: dict[str, httpx.Response] = {}
        threads = [
            threading.Thread(
                target=lambda id_=id_: answers.update({id_: client.put(f"/v1/documents/{id_}", json={"text": text[id_]})})
            )
            for id_ in text
        ]
    for thread in threads:
        thread.start()
        thread.join()
    assert {id_: answer.status_code for id_, answer in answers.items()} == {"big": 507, "small": 200}
    assert answers["big"].json()["error"]["code"] == "store_full"
    assert client.get("/v1/documents/small").json()["stored_chunks"] == 1


def test_an_upload_beyond_the_budget_is_told_so(open_engine: OpenEngine) -> None:
    """An upload whose KV does not fit the budget at once gets 507, and leaves nothing."""
    engine = open_engine(nvme_budget_bytes=60_000)
    limits = ServingConfig(guard_share=0.0)
    with serving(engine, limits) as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        response = client.post("/v1/documents", json={"documents": DOCUMENTS[:2]})
        assert response.status_code == 507
        assert "does not fit the store's byte budget" in response.json()["error"]["message"]
        assert client.get("/v1/documents").json()["data"] == []
        assert engine.store.ls() == []
        assert client.put("/v1/documents/small", json={"text": "few words"}).status_code == 200


def test_an_index_without_room_is_507(client: httpx.Client, engine: Engine) -> None:
    """A disk that has no room for the index is told as a full disk."""
    engine.retriever._catalog._db.execute("PRAGMA max_page_count = 1")
    response = client.put("/v1/documents/more", json={"text": "words " * 2000})
    assert (response.status_code, response.json()["error"]["code"]) == (507, "store_full")


def test_a_damaged_document_is_the_servers_fault(client: httpx.Client, engine: Engine) -> None:
    """A question that finds a damaged chunk gets 500 with what to do, and is answered when that was done."""
    id_ = str(DOCUMENTS[0]["id"])
    engine.retriever._catalog._db.execute(
        "UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE document_id = ?", (id_,)
    )
    body = {"model": MODEL, "messages": [{"role": "user", "content": str(DOCUMENTS[0]["text"])}], "max_tokens": 1}
    for response in (client.post("/v1/chat/completions", json=body), client.get(f"/v1/documents/{id_}")):
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "document_damaged")
        assert f"document {id_!r} is damaged" in error["message"]
        assert "ingest it again" in error["message"]
    assert client.post("/v1/documents", json={"documents": [DOCUMENTS[0]]}).status_code == 201
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    wait_until(lambda: engine.store.stats().pending_writes == 0)
