"""Changes of documents that a server has answered, and what it must know of them when it is started again."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import httpx
from server_process import MODEL

TEXT = " ".join(text for _, text in sorted(topics.items()))
IDS = 8  # of each writer's documents, so that some are replaced and some are deleted
CHARACTERS = 300
NO_ROOM = 507


@dataclass(slots=True)
class Acknowledged:
    """What was answered with 2xx.

    Args:
        texts: by id; None for what was deleted.
        doubtful: changes under way when the server was killed, by id: the text that may have come.
        changed: ids whose documents have not been asked about since they changed.
        unsettled: ids whose last change was not answered with 2xx.
        answered, asked, under_way, made, no_room: counts; see `scripts/crash_server.py`.
    """

    texts: dict[str, str | None] = field(default_factory=dict)
    doubtful: dict[str, str | None] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    answered: int = 0
    asked: int = 0
    under_way: int = 0
    made: int = 0
    no_room: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Writer:
    """Uploads, replaces and deletes documents of its own, whose ids begin with its name, until the server is gone."""

    def __init__(self, address: str, known: Acknowledged, name: str, ended: threading.Event) -> None:
        self._address, self._known, self._name, self._random = address, known, name, random.Random(name)
        self._ended = ended
        self.fault = ""

    def run(self) -> None:
        """Change one document after the other."""
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while not self.fault and not self._ended.is_set():
                id_ = f"{self._name}-{self._random.randrange(IDS)}"
                text = None if self._known.texts.get(id_) and self._random.random() < 0.2 else self._text(id_)
                try:
                    response = self._change(client, id_, text)
                except httpx.TransportError:
                    with self._known.lock:
                        self._known.doubtful[id_] = text
                        self._known.unsettled.add(id_)
                        self._known.under_way += 1
                    return
                if response.status_code == NO_ROOM and text is not None:  # a deletion must find room
                    self._look(client, id_, text)
                    continue
                if not response.is_success:
                    self.fault = f"{id_}: {response.status_code} {response.text}"
                    return
                with self._known.lock:
                    self._known.texts[id_] = text
                    self._known.changed.add(id_)
                    self._known.unsettled.discard(id_)
                    self._known.answered += 1

    def _look(self, client: httpx.Client, id_: str, text: str) -> None:
        """Look at a document whose upload had no room: its text is the one before or the new one; KV of it may be missing."""
        before = self._known.texts.get(id_)
        try:
            now = _text_of(client, id_)
        except httpx.TransportError:
            with self._known.lock:
                self._known.doubtful[id_] = text
                self._known.unsettled.add(id_)
            return
        if now not in (before, text):
            self.fault = f"{id_}: half a change: {now!r} is neither {before!r} nor {text!r}"
        with self._known.lock:
            self._known.texts[id_] = now
            self._known.unsettled.add(id_)
            self._known.changed.discard(id_)
            self._known.no_room += 1

    def _change(self, client: httpx.Client, id_: str, text: str | None) -> httpx.Response:
        path = f"/v1/documents/{id_}"
        if text is None:
            return client.delete(path)
        if self._known.texts.get(id_):
            return client.put(path, json={"text": text})
        return client.post("/v1/documents", json={"documents": [{"id": id_, "text": text}]})

    def _text(self, id_: str) -> str:
        """A text that no other document has."""
        start = self._random.randrange(len(TEXT) - CHARACTERS)
        return f"This is {id_}, {self._random.random()}. {TEXT[start : start + CHARACTERS]}"


def ask_until_gone(address: str, seed: int, ended: threading.Event) -> None:
    """Ask questions, streamed, until the server is gone, or that is ended."""
    choose = random.Random(seed)
    with httpx.Client(base_url=address, timeout=60) as client:
        while not ended.is_set():
            start = choose.randrange(len(TEXT) - CHARACTERS)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "What is said?"}],
                "documents": [{"text": TEXT[start : start + CHARACTERS]}],
                "max_tokens": 50,
                "stream": True,
            }
            try:
                client.post("/v1/chat/completions", json=body)
            except httpx.TransportError:
                return


def check_server(address: str, known: Acknowledged) -> None:
    """Compare a started server with what was acknowledged; what was under way is one or the other, and known from then on."""
    _check_texts(address, known)
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_ in sorted(known.changed):
            if known.texts[id_] is not None:
                _check_served(client, id_)
                known.asked += 1
    known.changed.clear()


def _check_texts(address: str, known: Acknowledged) -> None:
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_, text in known.doubtful.items():
            before, now = known.texts.get(id_), _text_of(client, id_)
            assert now in (before, text), f"{id_}: half a change: {now!r} is neither {before!r} nor {text!r}"
            known.made += now == text
            known.texts[id_] = now
            kept = now == before and text is not None  # a replacement drops nothing before its text is in
            (known.changed.add if kept else known.changed.discard)(id_)  # else KV may be missing: a deletion drops it first
        known.doubtful.clear()
        for id_, text in known.texts.items():
            if text is not None:
                assert _text_of(client, id_) == text, f"{id_}: not what was acknowledged"
        here = {id_ for id_, text in known.texts.items() if text is not None}
        assert _listed(client) == here, f"listed and acknowledged differ in {_listed(client) ^ here}"


def lost_documents(address: str, known: Acknowledged) -> set[str]:
    """The documents that were acknowledged and that the server does not list; a deletion under way may have been made."""
    kept = {id_ for id_, text in known.texts.items() if text is not None and known.doubtful.get(id_, text) is not None}
    with httpx.Client(base_url=address, timeout=60) as client:
        return kept - _listed(client)


def retire(address: str, known: Acknowledged, keep: int) -> None:
    """Delete all but the last `keep` documents, so that a small disk has room for new ones; their ids must stay gone."""
    here = [id_ for id_, text in known.texts.items() if text is not None]
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_ in here[: max(0, len(here) - keep)]:
            client.delete(f"/v1/documents/{id_}").raise_for_status()
            known.texts[id_] = None
            known.changed.discard(id_)
            known.answered += 1


def _listed(client: httpx.Client) -> set[str]:
    """The ids of all documents that the server lists."""
    ids: list[str] = []
    while True:
        page = (
            client.get("/v1/documents", params={"limit": 1000, **({"after": ids[-1]} if ids else {})}).raise_for_status().json()
        )
        ids += [document["id"] for document in page["data"]]
        if not page["has_more"]:
            return set(ids)


def _text_of(client: httpx.Client, id_: str) -> str | None:
    response = client.get(f"/v1/documents/{id_}")
    if response.status_code == 404:
        return None
    return "".join(part["text"] for part in response.raise_for_status().json()["content"])


def _check_served(client: httpx.Client, id_: str) -> None:
    """All of a document's KV is stored, and a question about it is answered from there."""
    shown = client.get(f"/v1/documents/{id_}").json()
    chunks = len(shown["content"])  # equal texts at two places of a document stand after different ones
    assert shown["stored_chunks"] == chunks, f"{id_}: {shown['stored_chunks']} of {chunks} chunks are stored"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": shown["content"][0]["text"]}],  # the words of one chunk: it is the nearest
        "num_chunks": 1,
        "recompute_ratio": 0.15,  # or else so short a prompt is computed in full
        "max_tokens": 1,
        "return_chunks": True,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    (chunk,) = answer["cacheblend"]["chunks"]
    assert chunk["document_id"] == id_, f"asked about {id_}, found {chunk['document_id']}"
    assert chunk["source"] in ("ram", "nvme"), f"{id_}: its chunk's KV was {chunk['source']}"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
