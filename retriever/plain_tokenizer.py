"""A tokenizer for plain text, which also cuts text into pieces of so many tokens."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import TYPE_CHECKING

from langchain_text_splitters.base import Tokenizer as TokenSplit
from langchain_text_splitters.base import split_text_on_tokens
from tokenizers import Tokenizer

from cacheblend.store.errors import RetrieverError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainTokenizer:
    """A private copy of a Hugging Face tokenizer that adds no special tokens, reads none in the text, and never truncates.

    A copy, because the tokenizer's owner may change its truncation or special-token settings from another thread while it
    is in use here. Special tokens are not read because a document that contains `</s>` must not end a prompt.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or the `tokenizers.Tokenizer` inside one.

    Raises:
        RetrieverError: the tokenizer is not a fast one.

    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            raise RetrieverError(
                f"{type(tokenizer).__name__} gives no character offsets, which splitting needs; "
                "use a model with a fast tokenizer (one that has a tokenizer.json)"
            )
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self._tokenizer.encode_special_tokens = True

    def ids(self, text: str) -> list[int]:
        """Token ids of `text` alone."""
        # As a batch: `encode` holds Python's lock, for a second with a text of a megabyte.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def cut(self, text: str, max_tokens: int, overlap_tokens: int = 0) -> list[str]:
        """Cut `text` every `max_tokens` tokens, by LangChain's token splitter; no piece is empty.

        Pieces are slices of `text`, not decoded tokens: decoding would turn a character whose bytes lie on both sides of a
        border into U+FFFD, and drop leading spaces with some tokenizers. Such a character goes whole to the later piece.
        Without overlap the pieces joined are exactly `text`; a text without tokens gives no piece.
        """
        offsets = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
        if not offsets:
            return []
        # LangChain counts and slices tokens; each token is its number here, and "decoding" looks up where it starts.
        # Borders never run backwards, whatever a normaliser does to offsets, so that no text is lost or doubled.
        borders = list(accumulate([0, *(start for start, _ in offsets[1:]), len(text)], max))
        split = TokenSplit(
            chunk_overlap=overlap_tokens,
            tokens_per_chunk=max_tokens,
            encode=lambda _: list(range(len(offsets))),
            decode=lambda numbers: text[borders[numbers[0]] : borders[numbers[-1] + 1]],
        )
        return split_text_on_tokens(text=text, tokenizer=split)
