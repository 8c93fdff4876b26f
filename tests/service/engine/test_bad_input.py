from pathlib import Path

import pytest
import torch
from engines import DOCUMENTS, POSITIONS, QUESTION, TOP_K, OpenEngine
from fakes import FakeEmbedder

from cacheblend.base.errors import CacheBlendError, ConfigError, InputError, PromptTooLongError, StoreDirectoryError
from cacheblend.base.options import from_options
from cacheblend.blend import Fusor
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.prompt import MAX_NEW_TOKENS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"question": ""}, InputError, "question='' is empty"),
        ({"question": " \n"}, InputError, "is empty"),
        ({"question": None}, InputError, "question=None is empty"),
        ({"question": "", "documents": DOCUMENTS}, InputError, "question='' is empty"),
        ({"question": None, "documents": DOCUMENTS}, InputError, "question=None is empty"),
        ({"num_chunks": 0}, InputError, "num_chunks=0 is not allowed"),
        ({"num_chunks": -1}, InputError, "num_chunks=-1"),
        ({"num_chunks": 1.5}, InputError, "num_chunks=1.5"),
        ({"top_k": -2}, ConfigError, "top_k=-2"),
        ({"documents": []}, InputError, "documents is empty"),
        ({"documents": [{"title": "t", "text": " "}]}, InputError, "empty text"),
        ({"documents": [{"title": "t"}]}, InputError, 'no "text"'),
        ({"documents": "text"}, InputError, "must be a dict"),
        ({"documents": {"text": "words"}}, InputError, "must be a dict"),
        ({"recompute_ratio": 1.5}, ConfigError, "recompute_ratio=1.5 is not allowed: a number from 0 to 1"),
        ({"recompute_ratio": -0.1}, ConfigError, "recompute_ratio=-0.1"),
        ({"recompute_ratio": float("nan")}, ConfigError, "recompute_ratio=nan"),
        ({"recompute_ratio": True}, ConfigError, "recompute_ratio=True"),
        ({"recompute_ratio": 1.5, "method": "full_recompute"}, ConfigError, "recompute_ratio=1.5"),
        ({"method": "magic"}, ConfigError, "method='magic' is not allowed: one of full_recompute, prefix_cache"),
        ({"max_tokens": 0}, ConfigError, "max_tokens=0"),
        ({"max_tokens": 1.5}, ConfigError, "max_tokens=1.5"),
        ({"max_tokens": True}, ConfigError, "max_tokens=True"),
        ({"max_tokens": POSITIONS}, PromptTooLongError, rf"and {POSITIONS} to generate are more than the model's {POSITIONS}"),
        ({"documents": [{"text": "word " * 600}]}, PromptTooLongError, "take fewer chunks, lower max_tokens"),
        ({"temperature": -1.0}, ConfigError, "temperature=-1.0"),
        ({"temperature": float("inf")}, ConfigError, "temperature=inf"),
        ({"top_p": 0.0}, ConfigError, "top_p=0.0"),
        ({"top_p": 1.1}, ConfigError, "top_p=1.1"),
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
    with pytest.raises(PromptTooLongError, match="1 to generate are more than"):
        engine.prepare(QUESTION, documents=[{"text": "word " * 600}])
    assert prepared.prompt.check_length(None, None) == MAX_NEW_TOKENS


def test_top_k_of_sampling(engine: Engine) -> None:
    """Sampling from the one most likely token is greedy, at any temperature."""
    greedy = engine.answer(QUESTION, num_chunks=TOP_K)
    assert engine.answer(QUESTION, num_chunks=TOP_K, temperature=2.0, top_k=1).token_ids == greedy.token_ids


def test_nothing_ingested(open_engine: OpenEngine) -> None:
    """A question to an empty index says what to do."""
    with pytest.raises(InputError, match="ingest some first"):
        open_engine().answer(QUESTION)


def options(model_dir: Path, tmp_path: Path, **more: object) -> dict[str, object]:
    return {"model": str(model_dir), "store_dir": tmp_path / "store", **more}


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
        ("chunk_overlap_tokens", -1),
        ("ram_budget_bytes", 0),
        ("nvme_budget_bytes", 0),
        ("embedder", ""),
        ("kv_cache_dtype", "zip"),
    ],
)
def test_bad_settings(model_dir: Path, tmp_path: Path, field: str, value: object) -> None:
    """A setting that is not allowed is refused by name and value before anything is made."""
    given = options(model_dir, tmp_path, **{field: value})
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


def test_store_is_something_else(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A folder whose `kv` holds something else is refused, with what it holds."""
    (tmp_path / "other" / "kv").mkdir(parents=True)
    (tmp_path / "other" / "kv" / "thesis.tex").write_text("precious")
    with pytest.raises(StoreDirectoryError, match=r"is not a store: it holds thesis\.tex"):
        open_engine(store_dir=tmp_path / "other")


def test_store_is_read_only(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store directory that cannot be written is refused; simulated, since a superuser may write anywhere."""
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(StoreDirectoryError, match="Permission denied"):
        open_engine()


def test_store_of_another_format(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A store of another format is refused with both formats."""
    open_engine().close()
    marker = tmp_path / "store" / "kv" / "store.json"
    marker.write_text(marker.read_text().replace("1", "99"))
    with pytest.raises(StoreDirectoryError, match="99"):
        open_engine()


def test_kv_of_another_dtype_is_not_found(open_ingested: OpenEngine, model_dir: Path) -> None:
    """KV stored in one dtype is not another dtype's: a bfloat16 engine on the same folder misses, and answers."""
    assert open_ingested().answer(QUESTION, num_chunks=TOP_K).plan.hits == TOP_K
    half = Fusor.from_pretrained(str(model_dir), dtype=torch.bfloat16)
    answer = open_ingested(fusor=half).answer(QUESTION, num_chunks=TOP_K)
    assert (answer.plan.hits, answer.plan.misses) == (0, TOP_K)
