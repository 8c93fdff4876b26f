"""Chunks that are found again in the texts of messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

from cacheblend.retriever import Chunk, PlainTokenizer
from cacheblend.retriever.document import content_hash

REMEMBERED_CHUNKS = 1024
LEAST_CHARACTERS = 16  # a shorter text stands in other texts by chance: it needs its separator after it


@dataclass(frozen=True, slots=True)
class LocatedChunks:
    """A text's parts, which joined are the text, and what was found in it.

    Args:
        parts: text and chunks, in order; a chunk stands for its text and, where `token_ids` has it, the separator.
        stored: chunks with the very token ids that were ingested.
        other: chunks that another text follows, or precedes, than at ingest: these are chunks of their own.
    """

    parts: tuple[str | Chunk, ...]
    stored: int
    other: int


class ChunkTexts:
    """The texts of chunks that were found lately. Thread-safe.

    Args:
        tokenizer: the model's fast tokenizer.
        separator: text that a chunk was tokenised with.
    """

    def __init__(self, tokenizer: object, separator: str) -> None:
        self._plain, self._separator = PlainTokenizer(tokenizer), separator  # type: ignore[arg-type]  # it checks the type
        self._lock = Lock()
        self._known: OrderedDict[str, Chunk] = OrderedDict()
        self._unused = False

    def remember(self, chunks: Iterable[Chunk]) -> None:
        """Note chunks that were handed out; the oldest beyond `REMEMBERED_CHUNKS` are forgotten."""
        with self._lock:
            for chunk in chunks:
                if chunk.text.strip():
                    self._known[chunk.text] = chunk
                    self._known.move_to_end(chunk.text)
                    self._unused = True
            while len(self._known) > REMEMBERED_CHUNKS:
                self._known.popitem(last=False)

    def take_unused(self) -> bool:
        """Whether chunks were remembered since the last call."""
        with self._lock:
            unused, self._unused = self._unused, False
        return unused

    def locate(self, text: str) -> LocatedChunks:
        """Cut a text at the remembered chunks that it holds word for word; of two that overlap the longer one counts.

        A chunk's white space at its ends may be missing, or its separator: then its ids are others than at ingest.
        """
        spans = self._spans(text)
        limits = [*(start for start, _, _ in spans[1:]), len(text)]
        parts: list[str | Chunk] = []
        stored = other = done = 0
        for (start, end, chunk), limit in zip(spans, limits, strict=False):
            ingested = chunk.text + self._separator
            first = start - (len(chunk.text) - len(chunk.text.lstrip()))
            last = first + len(ingested)
            is_whole = done <= first and last <= limit and text[first:last] == ingested
            if is_whole and tuple(self._plain.ids(ingested)) == chunk.token_ids:  # not ingested with other words around it
                parts += [text[done:first], chunk]
                done, stored = last, stored + 1
            else:
                found = text[start:end]
                ids = tuple(self._plain.ids(found))
                parts += [text[done:start], Chunk(content_hash(chunk.title, found), "", 0, chunk.title, found, ids)]
                done, other = end, other + 1
        return LocatedChunks(tuple(part for part in (*parts, text[done:]) if part != ""), stored, other)

    def _spans(self, text: str) -> list[tuple[int, int, Chunk]]:
        """Where the remembered chunks stand in a text, without the white space at their ends, in order."""
        with self._lock:
            known = list(self._known.values())
        spans: list[tuple[int, int, Chunk]] = []
        for chunk in sorted(known, key=lambda chunk: len(chunk.text), reverse=True):
            core = chunk.text.strip()
            if len(core) < LEAST_CHARACTERS:
                core += chunk.text[len(chunk.text.rstrip()) :] + self._separator
            start = text.find(core)
            while start >= 0:
                end = start + len(core)
                if all(end <= first or start >= last for first, last, _ in spans) and not _cuts_word(text, start, end):
                    spans.append((start, end, chunk))
                start = text.find(core, end)
        return sorted(spans, key=lambda span: span[0])


def _cuts_word(text: str, start: int, end: int) -> bool:
    """Whether a word goes on across one of the borders."""
    return any(0 < border < len(text) and text[border - 1 : border + 1].isalnum() for border in (start, end))
