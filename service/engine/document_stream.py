"""The documents of files, read one by one, or the share of them that one machine of several ingests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import Document

from .document_files import read_documents

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` shares, counted from 1. A document's share follows from its id alone, in whatever order.

    Raises:
        ConfigError: there is no such share.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ConfigError("shard", f"{self.index}/{self.count}", "i/n with i from 1 to n, such as 2/4")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "i/n"; raises as the class does."""
        if (found := re.fullmatch(r"(\d+)/(\d+)", text)) is None:
            raise ConfigError("shard", text, "i/n with i from 1 to n, such as 2/4")
        return cls(int(found[1]), int(found[2]))

    def holds(self, document_id: str) -> bool:
        """Whether the document is of this share."""
        digest = hashlib.sha256(document_id.encode()).digest()
        return int.from_bytes(digest, "big") % self.count == self.index - 1


@dataclass(frozen=True, slots=True)
class StreamSize:
    """What a stream gives: documents, and characters of their texts."""

    documents: int
    characters: int


class DocumentStream:
    """Documents of files, folders or standard input; memory holds one at a time.

    Args:
        sources: see `read_documents`.
        shard: gives only the documents of this share.

    Attributes:
        characters: of the texts that were given so far.
    """

    def __init__(self, sources: Sequence[str], shard: Shard) -> None:
        self._sources, self._shard = sources, shard
        self.characters = 0

    def measure(self) -> StreamSize | None:
        """Read it all once and check it; None for standard input, which can be read only once.

        Raises:
            InputError: a source or a document cannot be used, or there is none at all.
        """
        if STANDARD_INPUT in self._sources:
            return None
        documents = characters = given = 0
        for document in self._documents():
            given += 1
            if self._shard.holds(document.id):
                documents, characters = documents + 1, characters + len(document.text)
        if not given:
            raise InputError("no documents to ingest; give at least one")
        return StreamSize(documents, characters)

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents():
            if self._shard.holds(document.id):
                self.characters += len(document.text)
                yield document

    def _documents(self) -> Iterator[Document]:
        for source in self._sources:
            yield from map(Document.of, read_documents(source))
