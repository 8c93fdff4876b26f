"""Size of a stream of documents before it is ingested: documents, characters, and about how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHARACTERS_PER_TOKEN = 4.0  # of English text, where none can be tokenised
PIECE_CHARACTERS, SAMPLE_PIECES = 1024, 64  # that tokens are counted in: enough to know a language by, in some milliseconds


@dataclass(frozen=True, slots=True)
class StreamSize:
    """Size of a stream.

    Args:
        documents: how many.
        characters: of their texts.
        sample: pieces of the texts, from all over the stream.
    """

    documents: int
    characters: int
    sample: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def tokens(self, tokenizer: Any) -> int:
        """About how many tokens the texts are; by the sample where there are a sample and a tokenizer."""
        sampled = sum(map(len, self.sample))
        if not sampled or tokenizer is None:
            return round(self.characters / CHARACTERS_PER_TOKEN)
        from cacheblend.retriever import PlainTokenizer  # here, since `cacheblend --help` must not wait for it

        plain = PlainTokenizer(tokenizer)
        return round(self.characters * sum(len(plain.ids(piece)) for piece in self.sample) / sampled)


class TextSample:
    """Pieces at even distances of all texts together, as if these were one; `SAMPLE_PIECES` at most, however many there are."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._distance, self._characters = PIECE_CHARACTERS, 0

    def add(self, text: str) -> None:
        """Take what falls into a text."""
        while (at := len(self.pieces) * self._distance - self._characters) < len(text):
            self.pieces.append(text[at : at + PIECE_CHARACTERS])
            if len(self.pieces) > SAMPLE_PIECES:
                self.pieces, self._distance = self.pieces[::2], 2 * self._distance
        self._characters += len(text)
