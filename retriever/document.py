"""A document as a caller brings it, and a chunk: the piece of it that is embedded, found, and whose KV is cached."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cacheblend.base.errors import InputError

from .places import ChunkPlace

HASH_DIGITS = 32  # 128 bits: enough that two documents never share one by chance
# C0 and C1 control characters, which paths and terminals do not show, and what a byte that is no UTF-8 is read as.
NO_ID = re.compile("[\x00-\x1f\x7f-\x9f\ufffd]")
MAX_TITLE_CHARACTERS = 1000
MAX_ID_BYTES = 2048  # in UTF-8: the longest URL that is fetched and its page fit, and an id fits a page of PostgreSQL's indexes


@dataclass(frozen=True, slots=True)
class Document:
    """A document to split and index.

    Args:
        id: the caller's name for it, without control characters, at most `MAX_ID_BYTES`; adding the same id again replaces it.
        title: may be empty, at most `MAX_TITLE_CHARACTERS`; stands in front of the first chunk only.
        text: must hold more than white space.

    `version` is the hash of title and text: another version under the same id is another document.

    Raises:
        InputError: a field is not text, cannot be encoded as UTF-8, id or text is empty, an id has a control character, or an
            id or a title is too long.

    """

    id: str
    title: str
    text: str
    version: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("id", "title", "text"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InputError(f"document {self.id!r}: {name} must be text, got {type(value).__name__}; convert it to str")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"document {self.id!r}: {name} is not Unicode ({error.reason}); clean it first") from None
        if NO_ID.search(self.id):
            raise InputError(f"document {self.id!r}: id has a control character or U+FFFD; take one without")
        if (id_bytes := len(self.id.encode())) > MAX_ID_BYTES:
            raise InputError(
                f"document {self.id[:60]!r}...: its id has {id_bytes} bytes, and {MAX_ID_BYTES} are allowed; "
                "give it a shorter one"
            )
        if not self.id.strip():
            raise InputError(f"document {self.id!r} has an empty id; give it one, or leave id out to have its content's hash")
        if not self.text.strip():
            raise InputError(f"document {self.id!r} has an empty text; leave it out, or delete the document if it was ingested")
        if len(self.title) > MAX_TITLE_CHARACTERS:
            raise InputError(
                f"document {self.id!r}: its title has {len(self.title)} characters, and {MAX_TITLE_CHARACTERS} are allowed; "
                "shorten it, or put it in the text"
            )
        object.__setattr__(self, "version", content_hash(self.title, self.text))

    @classmethod
    def of(cls, raw: Document | Mapping[str, object]) -> Document:
        """Read `{"id": str, "title": str, "text": str}`; a missing id becomes the content's hash, other keys are ignored.

        Raises:
            InputError: not such a mapping, or a field is not allowed.

        """
        if isinstance(raw, Document):
            return raw
        if not isinstance(raw, Mapping):
            raise InputError(f'a document must be a dict {{"id", "title", "text"}}, got {type(raw).__name__} {str(raw)[:60]!r}')
        id_, title, text = raw.get("id"), raw.get("title"), raw.get("text")
        title = "" if title is None else title
        if text is None:
            raise InputError(f'document {id_ or title!r} has no "text"; its keys are {sorted(map(str, raw))}')
        if id_ is None:
            id_ = content_hash(str(title), str(text))
        return cls(id_, title, text)  # type: ignore[arg-type]  # __post_init__ checks the types

    @property
    def content(self) -> str:
        """What is split into chunks: the title's line, then the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def content_hash(title: str, text: str) -> str:
    """Hex digits of the SHA-256 of a title and a text."""
    data = f"{len(title)}:{title}{text}".encode(errors="surrogatepass")
    return hashlib.sha256(data).hexdigest()[:HASH_DIGITS]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a document with its token ids, which are final: nobody tokenises it again.

    Args:
        document_id: the document it was cut from.
        version: the version of that document.
        position: its number within the document, from 0.
        title: the document's title (part of `text` in chunk 0 only).
        text: the piece of the document, without the separator.
        token_ids: `text` and its trailing separator, tokenised once, alone, without special tokens.

    """

    document_id: str
    version: str
    position: int
    title: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk found for a question.

    Args:
        chunk: what was found.
        distance: squared L2 between the vectors of both; nearest is 0.
        score: cosine similarity of the two, however the chunk was found, or with a reranker its score; best is 1. NaN where
            nothing was searched.
        place: where it stands in its document.
    """

    chunk: Chunk
    distance: float
    score: float = math.nan
    place: ChunkPlace = field(default_factory=ChunkPlace)


def in_reading_order(found: Sequence[ScoredChunk]) -> list[ScoredChunk]:
    """Chunks of one document together and in its order, for a later one may refer back; documents by their best chunk."""
    rank = {id_: place for place, id_ in enumerate(dict.fromkeys(scored.chunk.document_id for scored in found))}
    return sorted(found, key=lambda scored: (rank[scored.chunk.document_id], scored.chunk.position))
