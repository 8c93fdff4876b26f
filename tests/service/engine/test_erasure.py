"""After a deletion no file of the store has the text, its token ids or its vectors, whoever has the store open."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from api import serving
from engines import DOCUMENTS, QUESTION, damage, key_of
from fakes import FakeEmbedder

from cacheblend.base.sqlite import truncate_log
from cacheblend.retriever import Chunk, Document, EmbeddedDocument
from cacheblend.retriever.catalog import Catalog
from cacheblend.service import Engine

FIRST, SECOND, *_ = DOCUMENTS
ID = str(FIRST["id"])


def files_with(folder: Path, traces: Sequence[bytes]) -> set[str]:
    """The files anywhere in a folder that have one of some bytes."""
    raws = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name for name, raw in raws.items() if any(trace in raw for trace in traces)}


def traces_of(chunks: Sequence[Chunk], embedder: FakeEmbedder) -> list[bytes]:
    """What files could have of chunks: texts and vectors, and token ids as the index and as headers of entries write them."""
    found = [vector.astype("<f4").tobytes() for vector in embedder.encode([chunk.text for chunk in chunks])]
    for chunk in chunks:
        listed = json.dumps(json.dumps(chunk.token_ids[:12]))[2:-2]
        found += [chunk.text[:20].encode(), np.asarray(chunk.token_ids[:12], "<i4").tobytes(), listed.encode()]
        found.append(listed.replace(" ", "").encode())
    return found


def ask_with_salt(engine: Engine, question: str) -> None:
    """Have KV of a salt stored, of the chunks that a question finds."""
    for _ in range(2):
        engine.answer(question, cache_salt="salt", num_chunks=6)
        engine.drain()


@pytest.mark.parametrize("by", ["the service", "the command line"])
def test_no_file_has_a_deleted_text(engine: Engine, by: str) -> None:
    """Nothing stays in index, logs, KV, that of a salt too, nor among damaged files; what others have stays."""
    folder, chunks = Path(engine.config.store_dir), engine.retriever.chunks(ID)
    with serving(engine) as (_, address), httpx.Client(base_url=address) as client:
        engine.ingest([{"id": ID, "title": ID, "text": f"Once it began so. {FIRST['text']}"}])
        ask_with_salt(engine, "How did it begin once?")
        salted = {entry.key for entry in engine.store.ls() if entry.key.namespace}
        engine.ingest([FIRST])
        assert {entry.key for entry in engine.store.ls() if entry.key.namespace} < salted, (
            "a replaced text's KV goes, a salt's too"
        )
        ask_with_salt(engine, QUESTION)
        assert len({entry.key.namespace for entry in engine.store.ls()}) == 2
        damage(engine, [key_of(engine, chunks[0])])
        engine.store.verify(repair=True)
        traces, others = (
            traces_of(chunks, FakeEmbedder()),
            traces_of(engine.retriever.chunks(str(SECOND["id"])), FakeEmbedder()),
        )
        assert {"index/catalogue.sqlite-wal", f"kv/damaged/{key_of(engine, chunks[0])}"} <= files_with(folder, traces)
        if by == "the service":
            client.delete(f"/v1/documents/{ID}").raise_for_status()
        else:
            command = [sys.executable, "-m", "cacheblend", "documents", "delete"]
            subprocess.run([*command, ID, "--yes", "--store-dir", folder], check=True, capture_output=True)
        assert files_with(folder, traces) == set()
        assert "index/catalogue.sqlite" in files_with(folder, others)
        assert ID not in {found.chunk.document_id for found in engine.search(QUESTION, 6)}
    assert engine.store.verify().ok
    assert engine.retriever.verify().ok


def test_rows_that_sqlite_has_moved(tmp_path: Path) -> None:
    """SQLite leaves copies of rows in pages from which it has moved them; they go with the document as well."""
    rng, live, gone = random.Random(2), dict[str, list[bytes]](), list[bytes]()
    catalog = Catalog(tmp_path / "catalogue.sqlite", {})

    for number in range(500):
        if rng.random() < 0.6 or not live:
            id_, title = f"{rng.random()}/{number:06d}", f"title {number:06d} " * rng.randint(1, 60)
            document = Document(id_, title, f"text {number:06d} " * rng.randint(1, 90))
            chunk = Chunk(id_, document.version, 0, title, document.text, (1,))
            catalog.put([EmbeddedDocument(document, [chunk], np.zeros((1, 4), np.float32))])
            live[id_] = [id_.encode(), title[:12].encode(), document.text[:11].encode()]
        else:
            id_ = rng.choice(list(live))
            catalog.delete(id_)
            gone += live.pop(id_)
    truncate_log(catalog._db)
    assert files_with(tmp_path, gone), "the case is not met any more: choose another seed"
    catalog.erase()
    assert files_with(tmp_path, gone) == set()
    assert sorted(catalog.ids()) == sorted(live)
    catalog.close()
