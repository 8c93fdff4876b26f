"""Real questions over real passages, where the evaluation data is at hand."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.retriever import Retriever, RetrieverConfig

DATA = Path(os.environ.get("CACHEBLEND_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.skipif(not (DATA / "musique_dev.jsonl").exists(), reason=f"no musique_dev.jsonl in {DATA} (set CACHEBLEND_DATA)")
def test_musique_passages_come_back_whole(tmp_path: Path) -> None:
    """Passages of twenty cases are ingested, found again by their own words, and joined from their chunks."""
    with (DATA / "musique_dev.jsonl").open(encoding="utf-8") as file:
        cases = [json.loads(line) for line in islice(file, 20)]
    passages = {passage["text"]: passage for case in cases for passage in case["passages"]}
    with Retriever(RetrieverConfig(directory=tmp_path, chunk_tokens=64), tiny_tokenizer(), FakeEmbedder()) as retriever:
        assert retriever.add(passages.values()).added == len(passages)
    with Retriever(RetrieverConfig(directory=tmp_path, chunk_tokens=64), tiny_tokenizer(), FakeEmbedder()) as retriever:
        for document in retriever.documents()[::40]:
            chunks = retriever.chunks(document.id)
            text = "".join(chunk.text for chunk in chunks).removeprefix(f"{document.title}\n")
            assert passages[text]["title"] == document.title
            assert retriever.search(chunks[0].text, 1)[0].distance == pytest.approx(0, abs=1e-6)
