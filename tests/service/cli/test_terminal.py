"""What others wrote does not drive the operator's terminal."""

import io
import json
import logging
import re
from itertools import count
from types import SimpleNamespace

import pytest
from engines import CHUNK_TOKENS, OpenEngine
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from cacheblend.cli import main as cli
from cacheblend.cli import terminal
from cacheblend.cli.terminal import PlainConsole, VisibleFormatter, print_table, visible, visible_json
from cacheblend.retriever import document

# Clears the screen; names the window; writes to the clipboard; clears it by C1; a link; a markup error; text backwards.
LINK = "[link=http://evil.example]x[/link]"
HOSTILE = ("\x1b[2J", "\x1b]0;owned\x07", "\x1b]52;c;cm0=\x07", "\x9b2J", LINK, "[/]", "\u202ecod.exe")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def hostile_store(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a store whose documents' ids (of an older version, which took any), titles and texts are hostile."""
    engine = open_engine(chunk_tokens=CHUNK_TOKENS)
    monkeypatch.setattr(document, "NO_ID", re.compile("(?!)"))
    engine.ingest([{"id": f"[bold]{bad}", "title": bad, "text": f"some {bad} text"} for bad in HOSTILE])
    monkeypatch.undo()
    engine.close()
    return str(engine.config.store_dir)


def test_documents_are_listed_and_shown(hostile_store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids, titles and texts are printed as they are, markup and all, with every control character escaped, errors too."""
    commands = [["ls"], *(["show", f"[bold]{bad}"] for bad in HOSTILE), ["show", "\x1b[2J[/]no such"]]
    said = ""
    for command in commands:
        with pytest.raises(SystemExit) as exit_:
            cli.main(["documents", *command, "--store-dir", hostile_store])
        captured = capsys.readouterr()
        assert bool(exit_.value.code) == ("no such" in command[-1])
        said += captured.out + captured.err
    assert not CONTROL.search(said)
    for shown in ("[bold]", "[/]", r"some \x1b[2J text", r"\x9b2J", r"\u202ecod.exe", LINK):
        assert shown in said
    assert r"there is no document '\x1b[2J[/]no such'" in said
    with pytest.raises(SystemExit):
        cli.main(["documents", "ls", "--store-dir", hostile_store, "--json"])
    listed = capsys.readouterr().out
    assert not CONTROL.search(listed.rstrip("\n"))
    assert [document["title"] for document in json.loads(listed)["documents"]] == list(HOSTILE)


@given(text=st.text(st.characters(exclude_categories=()), max_size=40))
def test_a_console_writes_no_control_character(text: str) -> None:
    """Strings, styled text and tables alike; a table's frame stays whole; JSON reads back as what it was."""
    console = PlainConsole(file=io.StringIO(), width=400, force_terminal=False)
    table = Table("title", "second")
    table.add_row(text, "x")
    for shown in (text, Text(text), table):
        console.print(shown)
    written = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert not CONTROL.search(written)
    written.encode()
    assert len({len(line) for line in written.splitlines() if line.startswith(("┏", "└"))}) == 1
    assert json.loads(visible_json(json.dumps(text, ensure_ascii=False))) == text
    assert visible(visible(text)) == visible(text)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """A row is one line, and no cell is cut, however narrow the terminal; figures stand at the right."""
    print_table(("name", "size", "note"), [("東京", "9 kB", "two\nlines"), ("x" * 99, "10 kB", "\x1b[2J")])
    assert capsys.readouterr().out.splitlines() == [
        f"name{'':95}   size  note",
        f"東京{'':95}   9 kB  two lines",
        rf"{'x' * 99}  10 kB  \x1b[2J",
    ]


def test_log_lines() -> None:
    """A log line with a document's id is escaped as well."""
    record = logging.LogRecord("name", logging.WARNING, "path", 1, "left out %s", ("\x1b[2J",), None)
    assert VisibleFormatter("%(message)s").format(record) == r"left out \x1b[2J"


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a bar of progress is a line every ten seconds."""
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=count(0, 4).__next__))
    with terminal.progress_bars() as progress:
        for done in range(7):
            progress("ingest", 1000 * done, 6000)
    assert capsys.readouterr().err == "ingest: 2,000 of 6,000\ningest: 5,000 of 6,000\n"
