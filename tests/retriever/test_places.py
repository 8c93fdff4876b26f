"""Where chunks stand in their documents: lines of the file, and the headings above."""

from pathlib import Path

import pytest
from fakes import BlindEmbedder, FakeEmbedder, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.retriever import Document, Retriever, RetrieverConfig, Splitter
from cacheblend.retriever.document import ChunkPlace, chunk_places, found_texts, front_title
from cacheblend.retriever.index import IndexedDocuments

PAGES = "Every request goes to the desk and is answered there within some days. " * 4
GUIDE = f"# Guide\n\nOf the house.\n\n## Travel abroad\n\n{PAGES}\n\n{PAGES}\n\n## Kitchen\n\n{PAGES}\n\n{PAGES}\n"


def places(text: str, id_: str = "guide.md", title: str = "", **options: object) -> tuple[list[str], list[ChunkPlace]]:
    config = RetrieverConfig(**{"chunk_tokens": 24, **options})  # type: ignore[arg-type]
    chunks = Splitter(tiny_tokenizer(), config).split(Document(id_, title, text))
    texts = [chunk.text for chunk in chunks]
    return texts, list(chunk_places(id_, title, texts))


@pytest.mark.parametrize(
    ("title", "text", "has_line"),
    [
        ("Guide", GUIDE, False),
        (" the  GUIDE", "\n\n### The Guide ###\r\nx", False),
        ("Guide", f"Guide to it\n\n{GUIDE}", True),
        ("Guide", "\n Guide\n=====\n\nx", False),
        ("Guide", "Guide\nto\n==\nx", True),
        ("Guide", "=====\nGuide\n=====\nx", True),
        ("Guide", "#Guide\n", True),
        ("# Guide", GUIDE, True),
        ("", GUIDE, False),
    ],
)
def test_a_title_stands_once(title: str, text: str, *, has_line: bool) -> None:
    """A title is no line before a text that begins with it as a heading; lines are the file's either way."""
    chunks, found = places(text, title=title)
    assert "".join(chunks) == (f"{title}\n{text}" if has_line else text)
    assert found[-1].lines is not None
    assert found[-1].lines[1] == text.rstrip().count("\n") + 1


@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("ab .\n"), min_size=1, max_size=400).filter(str.strip),
    title=st.sampled_from(["", "Title", "Two\nlines"]),
)
def test_lines_are_those_of_the_file(text: str, title: str) -> None:
    """In the file's lines that a chunk names stands its text, and no line more than that."""
    texts, found = places(text, title=title, chunk_tokens=7)
    file, heads = text.split("\n"), f"{title}\n" if title else ""
    for number, (chunk, place) in enumerate(zip(texts, found, strict=True)):
        assert place.lines is not None
        first, last = place.lines
        own = "".join(texts[: number + 1])[len(heads) :][-len(chunk) :].strip()  # without the title that is in no file
        assert 1 <= first <= last <= len(file)
        assert own in "\n".join(file[first - 1 : last])
        if own and len("".join(texts[:number])) >= len(heads):
            assert last - first == own.count("\n")


def test_lines_of_what_has_none() -> None:
    """A converted file's text has no lines; those of a page do not either."""
    assert {place.lines for place in places(GUIDE, "guide.docx")[1]} == {None}
    assert {place.lines for place in places(GUIDE, "guide.pdf#page=3")[1]} == {None}
    assert places(GUIDE)[1][0].lines == (1, 3)
    assert [str(ChunkPlace(lines, ("A", "B"))) for lines in ((1, 3), (2, 2), None)] == [
        ", lines 1-3, under A > B",
        ", line 2, under A > B",
        ", under A > B",
    ]


@pytest.mark.parametrize("url", ["https://a.org/", "http://a.org/index.php?b=c.py", "HTTPS://a.org/guide", "https://[::1/#b"])
def test_a_page_of_the_web(url: str) -> None:
    """It was converted, whatever its address ends with: it has headings and no lines."""
    found = places(GUIDE, url)[1]
    assert {place.lines for place in found} == {None}
    assert found[-1].headings == ("Guide", "Kitchen")


def test_headings() -> None:
    """A chunk is under the headings that are open where it begins, without its own, the title, code and what was closed."""
    parts = [
        "# A\nx\n",
        "## B ##\nx\n```\n# no heading\n```\n",
        "x\n",
        "### C#\nx\n",
        "x\n",
        "## D\nx",
        "\nx\n# E\n",
        "# F\n",
        "x",
    ]
    found = [place.headings for place in chunk_places("g.md", "a", parts)]
    assert found == [(), (), ("B",), ("B",), ("B", "C#"), (), ("D",), (), ("F",)]
    assert {place.headings for place in chunk_places("g.py", "", ["# a comment\n", "x = 1\n"])} == {()}
    [_, long] = chunk_places("g.md", "", [f"# {'long ' * 1000}\n", "x"])
    assert len(long.headings[0]) <= 80


def test_found_texts() -> None:
    """A chunk is found by file, title and headings, which the caller may shorten; the first has the title in its text."""
    texts = ["Title\n# One\n## Two\n", "words"]
    for letters, above in ((9, "One > Two"), (8, "Two"), (2, "Tw")):
        found = found_texts("g.md", "Ti", texts, lambda text, letters=letters: text[:letters])
        assert list(found)[1] == f"g\nTi\n{above}\nwords"
    named = {"t.md": "", "g.docx#page=2": "g\n", "g.py": "", "https://a.b/g.html": "", "7": ""}
    assert {id_: next(found_texts(id_, "Title", texts)) for id_ in named} == {
        id_: f"{name}{texts[0]}" for id_, name in named.items()
    }


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# Travel policy #\n\nTrains first.", "Travel policy"),
        ("\n\n# C#\r\nx", "C#"),
        ("Travel policy\n=============\n", "Travel policy"),
        ("---\ndate: 2031\ntitle: 'It is here'\n---\n# Other\n", "It is here"),
        ("---\ndate: 2031\n---\n\n# Other\n", "Other"),
        ("# [Solved] The lamp\n", "[Solved] The lamp"),
        ("# [a](b)\n", ""),
        ("# <img src=x> Lamp\n", ""),
        ("## Second level\n", ""),
        ("Words.\n\n# Later\n", ""),
        ("Two\nlines\n====", ""),
        (f"# {'long ' * 50}\n", ""),
        ("#!/bin/sh\n", ""),
    ],
)
def test_front_title(text: str, title: str) -> None:
    """A text's title is that of its front matter, or a plain heading of the first level before all words."""
    assert front_title(text) == title


def test_a_chunk_is_found_by_its_heading(tmp_path: Path) -> None:
    """A question about travel abroad finds the later chunks of that section, which do not say so."""
    embedder = BlindEmbedder("words")
    for _ in range(2):  # as added, and as read again
        config = RetrieverConfig(directory=tmp_path, chunk_tokens=24, search_rounds=1)
        with Retriever(config, tiny_tokenizer(), embedder) as retriever:
            retriever.add([{"id": "guide.md", "text": GUIDE}])
            found = retriever.search("travel abroad", 3)
            assert all("Travel abroad" in hit.chunk.text or "Travel abroad" in hit.place.headings for hit in found)
            assert sum("Travel abroad" not in hit.chunk.text for hit in found) >= 2
            lines = GUIDE.split("\n")
            for hit in found:
                assert hit.place.lines is not None
                first, last = hit.place.lines
                assert hit.chunk.text.strip() in "\n".join(lines[first - 1 : last])
    assert sum("Travel abroad\n" in text and "#" not in text for text in embedder.texts) >= 2  # by meaning too


def test_the_index_alone_knows_places(tmp_path: Path) -> None:
    """Without a model the places are the same."""
    with Retriever(RetrieverConfig(directory=tmp_path, chunk_tokens=24), tiny_tokenizer(), FakeEmbedder()) as retriever:
        retriever.add([{"id": "guide.md", "text": GUIDE}])
        expected = retriever.places(retriever.chunks())
    with IndexedDocuments.open(tmp_path) as index:
        found = index.places(index.chunks("guide.md"))
    assert found == expected
    assert found[1].lines is not None
    assert found[-1].headings
