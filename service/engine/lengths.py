"""What is longer than the model's positions is refused before any work is done."""

from __future__ import annotations

from collections.abc import Iterable

from cacheblend.base.errors import PromptTooLongError
from cacheblend.retriever import Document, Splitter

from .prompt import PromptPieces

MOST_NEW_TOKENS = 4096  # of an answer of a model that says nothing of its positions
CHARACTERS_PER_TOKEN = 64  # no text that is worth a prompt has tokens of so many in the mean


def check_chunks(documents: Iterable[Document], splitter: Splitter, positions: int | None, prefix_tokens: int) -> None:
    """Refuse documents that the model cannot read chunk by chunk.

    Args:
        documents: what is to be ingested.
        splitter: cuts them.
        positions: the model's; None for any number.
        prefix_tokens: tokens that chunks are computed behind.

    Raises:
        PromptTooLongError: a chunk and its prefix are longer than the model's positions.
    """
    chunk_tokens = splitter.config.chunk_tokens
    if positions is None or prefix_tokens + 2 * chunk_tokens <= positions:  # a chunk is a little over chunk_tokens
        return
    for document in documents:
        longest = max(len(chunk.token_ids) for chunk in splitter.split(document))
        if prefix_tokens + longest > positions:
            raise PromptTooLongError(
                f"document {document.id!r} has a chunk of {longest} tokens, and the model {positions} positions, of which "
                f"{prefix_tokens} are for what stands before it; lower chunk_tokens={chunk_tokens}"
            )


def check_characters(characters: int, positions: int | None) -> None:
    """Refuse a text that cannot be within the model's positions, before it is tokenised.

    Raises:
        PromptTooLongError: it has more characters than so many tokens could.
    """
    if positions is not None and characters > positions * CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(
            f"{characters} characters are more than the model's {positions} positions hold; ask a shorter question"
        )


def check_length(pieces: PromptPieces, max_tokens: int | None, positions: int | None) -> int:
    """Refuse a prompt that leaves no room for its answer; gives the most tokens of the answer.

    Args:
        pieces: the prompt.
        max_tokens: asked for; None for what fits behind the prompt.
        positions: the model's; None for any number, and then what fits is `MOST_NEW_TOKENS`.

    Raises:
        PromptTooLongError: prompt and answer are longer than the model's positions.
    """
    tokens = len(pieces.token_ids)
    if positions is None:
        return MOST_NEW_TOKENS if max_tokens is None else max_tokens
    if tokens + (max_tokens or 1) > positions:
        raise PromptTooLongError(
            f"{tokens} prompt tokens and {max_tokens or 1} to generate are more than the model's {positions} positions; "
            "take fewer chunks, lower max_tokens, ask a shorter question, or ingest smaller chunks"
        )
    return positions - tokens if max_tokens is None else max_tokens
