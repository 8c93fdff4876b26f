"""Documents and settings: what is accepted, and what a refusal says."""

import math
import re

import pytest

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import Document, RetrieverConfig


def test_missing_id_is_the_hash_of_the_content() -> None:
    """Two documents without an id are the same one only if title and text are the same."""
    first = Document.of({"title": "a", "text": "b"})
    assert first == Document.of({"text": "b", "title": "a", "id": None, "source": "ignored"})
    assert first.id == first.version
    assert len({first.id, Document.of({"text": "b"}).id, Document.of({"title": "ab", "text": "c"}).id}) == 3


def test_version_follows_title_and_text() -> None:
    """The version changes with the title or the text, not with the id."""
    version = Document("x", "t", "text").version
    assert Document("y", "t", "text").version == version
    assert version not in {Document("x", "t2", "text").version, Document("x", "t", "text2").version}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("text", "must be a dict"),
        ({"id": "d7", "title": "t"}, "'d7' has no \"text\""),
        ({"id": "d7", "text": " \n\t"}, "'d7' has an empty text"),
        ({"id": "d7", "text": 5}, "'d7': text must be text, got int"),
        ({"id": "d7", "title": ["t"], "text": "x"}, "'d7': title must be text, got list"),
        ({"id": 7, "text": "x"}, "7: id must be text, got int"),
        ({"id": " ", "text": "x"}, "empty id"),
        ({"id": "d7", "text": "\ud800"}, "'d7': text is not Unicode"),
        ({"text": "\ud800"}, "text is not Unicode"),
        ({"id": "a\nb", "text": "x"}, "'a\\nb': id has a control character"),
        ({"id": "\x9b2J", "text": "x"}, "id has a control character"),
        ({"id": "\ufffd", "text": "x"}, "id has a control character"),
        ({"id": "é" * 1025, "text": "x"}, "its id has 2050 bytes, and 2048 are allowed; give it a shorter one"),
    ],
)
def test_bad_document_is_refused(raw: object, says: str) -> None:
    """A document that cannot be used is refused by its id and what is wrong."""
    with pytest.raises(InputError, match=re.escape(says)):
        Document.of(raw)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_tokens", 0),
        ("chunk_tokens", 1.5),
        ("chunk_tokens", True),
        ("embedder", " "),
        ("directory", 3),
        ("min_score", 2),
        ("min_score", math.nan),
        ("min_score", "1"),
    ],
)
def test_bad_setting_is_refused(field: str, value: object) -> None:
    """A setting that is not allowed is refused at construction, by its name."""
    with pytest.raises(ConfigError, match=f"^{field}="):
        RetrieverConfig(**{field: value})  # type: ignore[arg-type]  # on purpose
