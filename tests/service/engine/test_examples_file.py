"""Example questions beside a store: read whoever wrote them, and none where the file is no list of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend.service.engine.config import EXAMPLES_FILE, read_examples


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, []), ("", []), ("{", []), ('{"a": 1}', []), ("3", []), ('["Why?", 3, null, " ", "Where?"]', ["Why?", "Where?"])],
)
def test_what_others_wrote(tmp_path: Path, text: str | None, found: list[str]) -> None:
    """A file that is missing, torn or something else is no error; of a list the texts are taken."""
    if text is not None:
        (tmp_path / EXAMPLES_FILE).write_text(text)
    assert read_examples(tmp_path) == found
