"""Fifty requests whose plans, greedy tokens and first logits were recorded once: no change of the house may change them.

`GOLDEN_RECORD=1 pytest tests/service/engine/test_golden.py` records anew; a change that needs it says why in its commit.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_model, profile_of, use_profile
from fakes import FakeEmbedder, tiny_tokenizer
from tiny_models import tiny_model

from cacheblend.base.options import from_options
from cacheblend.blend import Fusor
from cacheblend.eval.handbook import handbook_documents, handbook_questions
from cacheblend.service import Answer, Engine, EngineConfig
from cacheblend.service.engine.request import Request

pytestmark = pytest.mark.contract
GOLDEN = Path(__file__).parent / "golden.json"
RECORDS = "GOLDEN_RECORD" in os.environ
TIE = 2e-2  # of logits: processors differ by less, and closer ones may change places
COMMON_POSITIONS = 0.95  # of recomputed positions: the least that another processor's rounding leaves
DOCUMENTS = handbook_documents()[:12]
QUESTIONS = [item.question for item in handbook_questions()]
_NAMES = ("full_recompute", "prefix_cache", "full_reuse", "blend")


def _requests(chunks: int) -> list[dict[str, Any]]:
    """Retrieved chunks by every method and ratio, brought texts, repeated prefixes, other namespaces."""
    found = [{"method": method, "num_chunks": chunks} for method in (*_NAMES, "blend")]
    ratios = [{"recompute_ratio": ratio, "num_chunks": chunks - at % 2} for at, ratio in enumerate((0.0, 0.05, 0.14, 0.5, 1.0))]
    brought = [{"documents": [3, 1]}, {"documents": [1, 3], "recompute_ratio": 0.3}, {"documents": [3, 1]}]
    salted = [
        {"num_chunks": 2, "cache_salt": "one"},
        {"num_chunks": 2, "cache_salt": "one"},
        {"num_chunks": 2, "cache_salt": "two"},
    ]
    return [*found, *ratios, *brought, *salted, {"num_chunks": 1}, {"num_chunks": chunks + 1, "method": "prefix_cache"}]


def _ask(engine: Engine, at: int, options: dict[str, Any], max_tokens: int) -> Answer:
    options = dict(options)
    if "documents" in options:
        texts = [{"title": str(DOCUMENTS[i]["title"]), "text": str(DOCUMENTS[i]["text"])[:110]} for i in options["documents"]]
        options["documents"] = texts
    request: Request = engine.prepare(QUESTIONS[at % 3], max_tokens=max_tokens, **options)
    answer = engine.complete(request)
    engine.drain()
    return answer


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(repr(list(token_ids)).encode()).hexdigest()[:12]


def _record(answer: Answer) -> dict[str, Any]:
    """An answer in plain values; logits are those of the eight likeliest tokens."""
    plan, top = answer.plan, answer.first_logits.topk(8)
    return {
        "segments": [[s.kind, len(s.token_ids), _digest(s.token_ids), s.tier, s.key is not None] for s in plan.segments],
        "hits": plan.hits,
        "misses": plan.misses,
        "ratio": None if plan.recompute_ratio is None else round(plan.recompute_ratio, 4),
        "recomputed": [positions.tolist() for positions in plan.recomputed],
        "token_ids": answer.token_ids,
        "logits": [[int(i), round(float(v), 4)] for i, v in zip(top.indices, top.values, strict=True)],
    }


@contextmanager
def _tiny(folder: Path, family: str) -> Iterator[Engine]:
    """An engine on a tiny random model, its documents ingested."""
    if family == "llama":
        make_model(folder / "model")
    else:
        tiny_model(family, vocab=len(tiny_tokenizer())).save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
    options = {"model": str(folder / "model"), "store_dir": folder / "store", "chunk_tokens": 24}
    with Engine(
        from_options(EngineConfig, options), fusor=Fusor.from_pretrained(str(folder / "model")), embedder=FakeEmbedder()
    ) as engine:
        engine.ingest([{**document, "text": str(document["text"])[:300]} for document in DOCUMENTS])
        yield engine


@contextmanager
def _smollm2(model: Path, folder: Path) -> Iterator[Engine]:
    """An engine on SmolLM2 in float32."""
    options = {"model": str(model), "store_dir": folder / "store", "chunk_tokens": 96, "dtype": "float32"}
    with Engine(from_options(EngineConfig, options), embedder=FakeEmbedder()) as engine:
        engine.ingest([{**document, "text": str(document["text"])[:1200]} for document in DOCUMENTS])
        yield engine


def _run(engine: Engine, requests: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    return [_record(_ask(engine, at, options, max_tokens)) for at, options in enumerate(requests)]


def _check(name: str, records: list[dict[str, Any]]) -> None:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if RECORDS:
        golden[name] = records
        groups = (f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for key, rows in golden.items())
        GOLDEN.write_text("{\n" + ",\n".join(groups) + "\n}\n")
        return
    assert len(records) == len(golden[name])
    for at, (record, expected) in enumerate(zip(records, golden[name], strict=True)):
        where = f"{name}, request {at}"
        for field in ("segments", "hits", "misses", "ratio"):
            assert json.loads(json.dumps(record[field])) == expected[field], f"{where}: {field}"
        assert [len(row) for row in record["recomputed"]] == [len(row) for row in expected["recomputed"]], where
        for own, theirs in zip(record["recomputed"], expected["recomputed"], strict=True):
            assert len(set(own) & set(theirs)) >= COMMON_POSITIONS * len(theirs), f"{where}: recomputed positions"
        values, wanted = dict(record["logits"]), dict(expected["logits"])
        common = values.keys() & wanted.keys()
        assert len(common) >= 6, f"{where}: likeliest tokens"
        assert max(abs(values[token] - wanted[token]) for token in common) < TIE, f"{where}: logits"
        best, second = (value for _, value in expected["logits"][:2])
        if best - second > TIE:
            assert record["token_ids"][0] == expected["token_ids"][0], f"{where}: first token"
        assert record["token_ids"] == expected["token_ids"], f"{where}: greedy tokens"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tiny_models(family: str, tmp_path: Path) -> None:
    """Requests to an engine without a profile, then with one that makes loading slow and one that makes it fast."""
    with _tiny(tmp_path, family) as engine:
        records = _run(engine, _requests(6), 6)
        for row_s, bytes_per_s in ((1e-5, 1e9), (1e-6, 1e6)):
            use_profile(engine, profile_of(engine, row_s=row_s, bytes_per_s=bytes_per_s))
            records += _run(engine, [{"num_chunks": 6}, {"num_chunks": 3}][: 2 if row_s > 5e-6 else 1], 6)
    _check(family, records)


@pytest.mark.real_model
def test_smollm2(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Requests to a pretrained model."""
    torch.manual_seed(0)
    with _smollm2(real_model("smollm2-135m"), tmp_path) as engine:
        records = _run(engine, _requests(5)[4:12], 8)
    _check("smollm2-135m", records)
