"""Marks of a request: where its chunks stand, and what its block hashes are salted with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cacheblend.base.errors import InputError

PARAMS_KEY = "cacheblend"  # in vLLM's `kv_transfer_params`, of a request and of its answer


@dataclass(frozen=True, slots=True)
class Marks:
    """Places of a prompt's chunks.

    Args:
        chunks: (start, stop) token positions of each chunk, in order, without overlap.
        ratio: recompute ratio, 0..1; None for the connector's.
        documents: the number of the document that each chunk is of, where chunks of one document stand in its order; a chunk's
            KV is then computed after the ones before it. Empty: every chunk is a document of its own.
    """

    chunks: tuple[tuple[int, int], ...]
    ratio: float | None = None
    documents: tuple[int, ...] = ()

    @classmethod
    def read(cls, params: Any, prompt_tokens: int) -> Marks:
        """The marks in `kv_transfer_params["cacheblend"]`: `{"chunks": [[start, stop], ...], "ratio": 0.14}`.

        Raises:
            InputError: they are not of that form, or do not fit the prompt.
        """
        if not isinstance(params, Mapping) or (unknown := sorted(params.keys() - {"chunks", "ratio", "documents"})):
            named = f"unknown {', '.join(unknown)}" if isinstance(params, Mapping) else f"{type(params).__name__}"
            raise InputError(f'kv_transfer_params["{PARAMS_KEY}"]: {named}; give chunks, and ratio or documents if need be')
        chunks, ratio, documents = params.get("chunks"), params.get("ratio"), params.get("documents") or []
        if not isinstance(chunks, list | tuple) or not all(_is_span(chunk) for chunk in chunks):
            raise InputError("chunks: give a list of [start, stop] token positions")
        spans = tuple((int(start), int(stop)) for start, stop in chunks)
        borders = [border for span in spans for border in span]
        if any(last < first for first, last in pairwise(borders)) or any(start == stop for start, stop in spans):
            raise InputError("chunks: spans must be in order, without overlap, and none may be empty")
        if borders and (borders[0] < 0 or borders[-1] > prompt_tokens):
            raise InputError(f"chunks: spans must lie within the prompt's {prompt_tokens} tokens")
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise InputError(f"ratio={ratio!r}: give a number from 0 to 1")
        if documents and (len(documents) != len(spans) or not all(type(document) is int for document in documents)):
            raise InputError("documents: give a whole number for each chunk")
        return cls(spans, None if ratio is None else float(ratio), tuple(documents))

    def as_params(self) -> dict[str, Any]:
        """Result of `read`."""
        params: dict[str, Any] = {"chunks": [list(chunk) for chunk in self.chunks]}
        if self.ratio is not None:
            params["ratio"] = self.ratio
        if self.documents:
            params["documents"] = list(self.documents)
        return params

    def salt(self, ratio: float, context: str) -> bytes:
        """Salt of blocks blended with these marks, which separates them from exact ones and those of other marks.

        Args:
            ratio: the one that the prompt is blended with, or the least one where the marks name none.
            context: names what chunks' KV is computed after.
        """
        named = {
            "ratio": ratio,
            "is_least": self.ratio is None,
            "chunks": self.chunks,
            "documents": self.documents,
            "context": context,
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()


def _is_span(span: Any) -> bool:
    return isinstance(span, list | tuple) and len(span) == 2 and all(type(border) is int for border in span)
