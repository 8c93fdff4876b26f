import gc
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from engines import DOCUMENTS, QUESTION, TOP_K, OpenEngine, entry_file, key_of
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.base.errors import CacheBlendError, InputError, RetrieverError, StoreDirectoryError, StoreError
from cacheblend.blend import Fusor
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.request import METHODS


def precomputes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "background-precompute"]


def open_files(folder: Path) -> list[Path]:
    """Files under a folder that this process has open, where the system tells."""
    targets = [link.resolve() for link in Path("/proc/self/fd").glob("*")]
    return [target for target in targets if target.is_relative_to(folder.resolve())]


def test_closing(open_ingested: OpenEngine, tmp_path: Path) -> None:
    """A closed engine leaves no thread and no open file, closing again does nothing, and its answers stay usable."""
    with open_ingested() as engine:
        answer = engine.answer(QUESTION, num_chunks=TOP_K)
        if sys.platform == "linux":
            assert open_files(tmp_path)
    assert not precomputes()
    assert not open_files(tmp_path)
    engine.close()
    assert len(answer.as_dict()["token_ids"]) == engine.config.max_tokens
    for request in ({"documents": DOCUMENTS[:1]}, {"num_chunks": TOP_K}):
        with pytest.raises(CacheBlendError, match="closed"):
            engine.answer(QUESTION, **request)
    with pytest.raises(CacheBlendError, match="closed"):
        engine.ingest(DOCUMENTS)
    with pytest.raises(StoreError, match="closed"):
        engine.drain()


def test_closing_with_misses_left(engine: Engine) -> None:
    """Closing does not wait for the missed chunks that are left; the next engine misses them again."""
    engine.store.delete(key_of(engine, engine.answer(QUESTION, num_chunks=TOP_K).chunks[0].chunk))
    with engine.foreground:
        engine.answer(QUESTION, num_chunks=TOP_K)
        engine.close()
    assert not precomputes()


def test_closing_in_the_middle_of_a_precompute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the precompute that is under way, and its KV is stored."""
    key = key_of(engine, engine.answer(QUESTION, num_chunks=TOP_K).chunks[0].chunk)
    engine.store.delete(key)
    precompute_document, begun, gate = engine.fusor.precompute_document, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> object:
        begun.set()
        assert gate.wait(60)
        return precompute_document(*arguments, **options)

    monkeypatch.setattr(engine.fusor, "precompute_document", slow)
    engine.answer(QUESTION, num_chunks=TOP_K)
    assert begun.wait(60)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    gate.set()
    closer.join(60)
    assert not precomputes()
    assert entry_file(engine, key).exists()


def test_the_blocks_own_error_is_seen(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in a `with` block is not replaced by what the store could not write; otherwise that is logged."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cacheblend.store.entry_file._write", no_room)
    documents = [{"text": "some words"}]

    def fail(error: Exception | None) -> None:
        with open_engine() as engine:
            engine.answer(QUESTION, documents=documents)
            engine.background.drain = lambda: None  # type: ignore[method-assign]  # the store's error is left for its close
            wait_until(lambda: engine.store.stats().failed_writes == 1)
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="mine"):
        fail(KeyError("mine"))
    caplog.clear()
    fail(None)
    assert "was not written: no room on the disk" in caplog.text


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_unclosed(model_dir: Path, fusor: Fusor, tmp_path: Path) -> None:
    """An engine that is dropped warns, its thread ends, and store and index are closed with it."""
    config = EngineConfig(model=str(model_dir), store_dir=tmp_path / "store")

    def drop() -> None:
        Engine(config, fusor=fusor, embedder=FakeEmbedder())
        gc.collect()
        wait_until(lambda: not precomputes())
        gc.collect()

    with pytest.warns(ResourceWarning) as caught:
        drop()
    assert any("the engine on" in str(warning.message) for warning in caught)
    assert not open_files(tmp_path)


@pytest.mark.parametrize(
    ("break_it", "options", "error"),
    [
        (lambda folder: (folder / "index").write_text("x"), {}, RetrieverError),
        (lambda folder: (folder / "kv").write_text("x"), {}, StoreDirectoryError),
        (lambda _: None, {"instruction": "word " * 600}, InputError),
    ],
    ids=["index is a file", "kv is a file", "instruction too long"],
)
def test_failing_to_open(
    model_dir: Path, fusor: Fusor, tmp_path: Path, break_it: object, options: dict[str, str], error: type[Exception]
) -> None:
    """An engine that cannot be made closes what it had opened: no warning, no thread, no open file."""
    folder = tmp_path / "store"
    folder.mkdir()
    break_it(folder)  # type: ignore[operator]  # a function of the list above
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(error):
            Engine(EngineConfig(model=str(model_dir), store_dir=folder, **options), fusor=fusor, embedder=FakeEmbedder())
        gc.collect()
    assert not [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert not precomputes()
    assert not open_files(tmp_path)


def test_ingest_and_answer_are_quiet(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged where nothing is wrong."""
    with caplog.at_level(logging.INFO):
        for method in METHODS:
            engine.answer(QUESTION, num_chunks=TOP_K, method=method)
        engine.drain()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
