from pathlib import Path

import pytest
import torch
from engines import DOCUMENTS, POSITIONS, QUESTION, TOP_K, OpenEngine
from fakes import FakeEmbedder

from cacheblend.base.errors import CacheBlendError, ConfigError, InputError, PromptTooLongError
from cacheblend.base.options import from_options
from cacheblend.blend import Fusor
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.prompt import MAX_NEW_TOKENS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"question": ""}, InputError, "question='' is empty"),
        ({"question": "", "documents": DOCUMENTS}, InputError, "question='' is empty"),
        ({"question": "half \ud800"}, InputError, "half of a surrogate pair"),
        ({"num_chunks": 0}, InputError, "num_chunks=0 is not allowed"),
        ({"num_chunks": 1.5}, InputError, "num_chunks=1.5"),
        ({"top_k": -2}, ConfigError, "top_k=-2"),
        ({"documents": []}, InputError, "documents is empty"),
        ({"documents": [{"title": "t", "text": " "}]}, InputError, "empty text"),
        ({"documents": [{"title": "t"}]}, InputError, 'no "text"'),
        ({"documents": "text"}, InputError, "must be a dict"),
        ({"recompute_ratio": 1.5}, ConfigError, "recompute_ratio=1.5 is not allowed: a number from 0 to 1"),
        ({"recompute_ratio": float("nan")}, ConfigError, "recompute_ratio=nan"),
        ({"recompute_ratio": True}, ConfigError, "recompute_ratio=True"),
        ({"recompute_ratio": 1.5, "method": "full_recompute"}, ConfigError, "recompute_ratio=1.5"),
        ({"method": "magic"}, ConfigError, "method='magic' is not allowed: one of full_recompute, prefix_cache"),
        ({"max_tokens": 0}, ConfigError, "max_tokens=0"),
        ({"max_tokens": True}, ConfigError, "max_tokens=True"),
        (
            {"max_tokens": POSITIONS},
            PromptTooLongError,
            rf"context length is {POSITIONS} tokens, .* and {POSITIONS} to generate",
        ),
        ({"documents": [{"text": "word " * 600}]}, PromptTooLongError, "take fewer chunks, lower max_tokens"),
        ({"temperature": -1.0}, ConfigError, "temperature=-1.0"),
        ({"temperature": float("inf")}, ConfigError, "temperature=inf"),
        ({"top_p": 1.1}, ConfigError, "top_p=1.1"),
        ({"seed": 2**70}, ConfigError, "seed=1180"),
    ],
)
def test_bad_requests(engine: Engine, options: dict[str, object], error: type[Exception], message: str) -> None:
    """A request that cannot be answered is refused by what is wrong with it, and the engine goes on."""
    request = {"question": QUESTION, "num_chunks": TOP_K, **options}
    with pytest.raises(error, match=message):
        engine.answer(**request)
    assert len(engine.answer(QUESTION, num_chunks=TOP_K).token_ids) == engine.config.max_tokens


def test_the_longest_prompt(engine: Engine) -> None:
    """A prompt and its answer may fill the model's positions to the last one, and not a token more."""
    tokens = engine.answer(QUESTION, num_chunks=TOP_K).plan.prompt_tokens
    answer = engine.answer(QUESTION, num_chunks=TOP_K, max_tokens=POSITIONS - tokens)
    assert 0 < len(answer.token_ids) <= POSITIONS - tokens
    with pytest.raises(PromptTooLongError):
        engine.answer(QUESTION, num_chunks=TOP_K, max_tokens=POSITIONS - tokens + 1)


def test_an_answer_is_as_long_as_fits(open_ingested: OpenEngine) -> None:
    """Where neither question nor config says how long, an answer may fill the model's positions; the config's limit holds."""
    engine = open_ingested(max_tokens=None)
    for num_chunks in (1, 3):
        prepared = engine.prepare(QUESTION, num_chunks=num_chunks)
        assert len(prepared.prompt.token_ids) + prepared.max_tokens == POSITIONS
    assert engine.prepare(QUESTION, num_chunks=1, max_tokens=7).max_tokens == 7
    with pytest.raises(PromptTooLongError, match="and 1 to generate"):
        engine.prepare(QUESTION, documents=[{"text": "word " * 600}])
    engine.close()
    for cap in (7, POSITIONS):
        assert open_ingested(max_tokens=cap).prepare(QUESTION, num_chunks=3).max_tokens == min(cap, prepared.max_tokens)
    assert prepared.prompt.check_length(None, None) == MAX_NEW_TOKENS


def test_nothing_ingested(open_engine: OpenEngine) -> None:
    """A question to an empty index says what to do."""
    with pytest.raises(InputError, match="ingest some first"):
        open_engine().answer(QUESTION)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("store_dir", ""),
        ("store_dir", None),
        ("dtype", "float8"),
        ("dtype", torch.float32),
        ("device", "gpu"),
        ("device", "meta"),
        ("device", "cuda:99"),
        ("device", None),
        ("max_tokens", 0),
        ("recompute_ratio", 1.5),
        ("selector", "magic"),
        ("chunk_tokens", 0),
        ("ram_budget_bytes", 0),
        ("embedder", ""),
        ("kv_cache_dtype", "zip"),
    ],
)
def test_bad_settings(model_dir: Path, tmp_path: Path, field: str, value: object) -> None:
    """A setting that is not allowed is refused by name and value before anything is made."""
    given = {"model": str(model_dir), "store_dir": tmp_path / "store", field: value}
    with pytest.raises(ConfigError, match=f"{field}=") as caught:
        _ = EngineConfig(**given) if value is None else from_options(EngineConfig, given)
    assert caught.value.value is value
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "no-such-model", "nobody/no-such-model"])
def test_no_model(tmp_path: Path, model: str) -> None:
    """A model that is not there is named, with what to give instead, and no store is made."""
    with pytest.raises(InputError, match=f"{model}.*hub id"):
        Engine(EngineConfig(model=model, store_dir=tmp_path / "store"), embedder=FakeEmbedder())
    assert not (tmp_path / "store").exists()


def test_no_tokenizer(fusor: Fusor, tmp_path: Path) -> None:
    """A model without a tokenizer is refused before a store is made."""
    with pytest.raises(InputError, match="no tokenizer"):
        Engine(EngineConfig(model="here", store_dir=tmp_path / "store"), fusor=Fusor(fusor.model), embedder=FakeEmbedder())
    assert not (tmp_path / "store").exists()


def test_store_is_a_file(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A store directory that is a file is refused by name and left as it is."""
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(CacheBlendError, match=str(file)):
        open_engine(store_dir=file)
    assert file.read_text() == "precious"
