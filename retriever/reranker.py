"""The reranker: a model that reads question and chunk together, and reorders the found chunks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cacheblend.base.errors import RetrieverError

from .embedder import check_stopped, load_quietly

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

HUB_OWNER = "cross-encoder/"  # the hub's owner of models that are named without one
BATCH_PAIRS = 8  # read together; whoever waits for the search is asked between two whether it still does
_REMEDY = "`hf download` fetches one where there is a network, or give the path of a CrossEncoder folder"


class Reranker(Protocol):
    """Model that scores how well chunks answer a question; used from several threads."""

    def scores(self, question: str, texts: Sequence[str]) -> list[float]:
        """A score of each text, 0..1, the higher the better."""


class CrossEncoderReranker:
    """A CrossEncoder of sentence-transformers with one label; loaded at the first use.

    It reads the beginning of a long text, as much as fits beside the question.

    Args:
        name: a model of the hub (`ms-marco-MiniLM-L6-v2`), or the path of a folder.
        device: a torch device; None lets sentence-transformers choose.
    """

    def __init__(self, name: str, device: str | None = None) -> None:
        self.name, self._device = name, device
        self._lock = threading.Lock()  # over loading and use: a tokenizer is changed by each use
        self._model: CrossEncoder | None = None

    def scores(self, question: str, texts: Sequence[str]) -> list[float]:
        """A score of each text, 0..1; loads the model.

        Raises:
            RetrieverError: the model cannot be loaded, has more than one label, or returns no numbers.
        """
        from torch.nn import Sigmoid

        found: list[float] = []
        for first in range(0, len(texts), BATCH_PAIRS):
            check_stopped(first, len(texts))
            pairs = [(question, text) for text in texts[first : first + BATCH_PAIRS]]
            with self._lock:
                model = self._model = self._model or self._load()
                scores = model.predict(pairs, batch_size=BATCH_PAIRS, show_progress_bar=False, activation_fn=Sigmoid())
            found += np.asarray(scores, dtype=np.float64).reshape(len(pairs)).tolist()
        if not np.isfinite(found).all():
            raise RetrieverError(f"reranker {self.name!r} gives scores that are no numbers; use another model")
        return found

    def _load(self) -> CrossEncoder:
        from sentence_transformers import CrossEncoder

        in_folder = Path(self.name).is_dir()
        source = self.name if in_folder or "/" in self.name else HUB_OWNER + self.name
        model: CrossEncoder = load_quietly(
            lambda **options: CrossEncoder(
                source, device=self._device, trust_remote_code=False, model_kwargs={"use_safetensors": True}, **options
            ),
            f"reranker {self.name!r}",
            None if in_folder else source,
            _REMEDY,
        )
        if model.num_labels != 1:
            raise RetrieverError(f"reranker {self.name!r} has {model.num_labels} labels; use one with a single score")
        return model
