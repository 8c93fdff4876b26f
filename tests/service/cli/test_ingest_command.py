"""`cacheblend ingest`: what is read, what is said of it, and how it ends."""

import io
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from command_line import CommandLine

from cacheblend.cli import ingest, terminal
from cacheblend.service import Engine
from cacheblend.service.engine.ingest import IngestReport


@pytest.fixture
def much(tmp_path: Path) -> str:
    """A file whose KV needs more disk than is used unasked."""
    path = tmp_path / "much.txt"
    path.write_text("words of a long text, in a line\n" * 240_000)
    return str(path)


def test_an_ingest_says_what_it_takes(
    run: CommandLine, passages: Path, much: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV a token and disk are said first; much is asked about, and refused where nobody can be asked, or no disk has room."""
    said = run.on_store("ingest", str(passages)).err
    assert "kB a token (raw): about" in said
    assert str(run.store) in said
    assert "1 file read: 3 documents, as a page" in said
    assert "about 0 tokens, 0 bytes more" in run.on_store("ingest", str(passages)).err, "all is there"
    shutil.rmtree(run.store / "kv")
    assert "about 0 tokens" not in run.on_store("ingest", str(passages)).err, "the KV must be computed"
    (new := tmp_path / "new.txt").write_text("words of a long text, in a line\n" * 16)
    said = run.on_store("ingest", str(passages), str(new)).err
    assert "0 bytes more" not in said, "new texts need as much beside those that are there"
    small = run.on_store("ingest", str(passages), "--nvme-budget-bytes", "200000").err
    assert "what does not fit is evicted: give --kv-cache-dtype int8 or int4" in small
    run.store = run.store.with_name("other")
    refused = run.on_store("ingest", much)
    assert (refused.code, "give --yes" in refused.err) == (2, True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    refused = run.on_store("ingest", str(passages))
    assert (refused.code, "which may hold 1.0 kB; the disk has no room for it: free" in refused.err) == (1, True)
    assert not (run.store / "kv").exists(), "nothing was begun"


def test_an_ingest_on_ray_says_what_it_takes(
    run: CommandLine, passages: Path, much: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --ray too, disk and KV are said, by the model's config, and much is asked about without --yes."""
    begun: list[object] = []

    def distributed(*arguments: object, **_: object) -> IngestReport:
        begun.append(arguments)
        return IngestReport()

    monkeypatch.setitem(
        sys.modules, "cacheblend.integrations.ray.ingest", cast(ModuleType, SimpleNamespace(ingest_on_ray=distributed))
    )
    here = run.on_store("ingest", str(passages)).err
    estimate = next(line for line in here.splitlines() if "kB a token" in line)
    run.store = run.store.with_name("other")
    assert estimate.partition(", ")[0] in run.on_store("ingest", str(passages), "--ray", "local").err
    refused = run.on_store("ingest", much, "--ray", "local")
    assert (refused.code, "give --yes" in refused.err, len(begun)) == (2, True, 1)
    assert run.on_store("ingest", much, "--ray", "local", "--yes").code == 0


def test_a_folder_with_bad_files(run: CommandLine, tmp_path: Path) -> None:
    """The good files are ingested and can be asked about; the bad ones are listed at the end, with exit code 1."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.txt").write_bytes("Der Müller heißt Ada und wohnt über der Brücke.".encode("cp1252"))
    (folder / "empty.txt").touch()
    (folder / "binary.md").write_bytes(bytes(range(256)))
    (folder / ".secret.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    outcome = run.on_store("ingest", str(folder))
    assert outcome.code == 1
    assert outcome.out.startswith("1 document (1 new")
    *_, head, first = outcome.err.splitlines()
    assert head == "1 file could not be used:"
    assert first.strip() == f"{folder / 'binary.md'}: binary, or text in no known encoding; save it as UTF-8"
    assert f"skipped, empty; write something into it, or leave it out: {folder / 'empty.txt'}" in outcome.err
    assert f"skipped, hidden: {folder / '.secret.txt'}" in outcome.err
    assert f"skipped, image; describe it in a text file: {folder / 'picture.png'}" in outcome.err
    again = run.on_store("ingest", str(folder), "--json")
    assert (again.code, again.json["unchanged"], len(again.json["faults"])) == (1, 1, 1)  # type: ignore[arg-type]
    assert run.on_store("ask", "Wer ist Ada?", "--json").json["chunks"][0]["document_id"] == "good.txt"  # type: ignore[index]


def test_prune(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--prune` deletes what no source has any more, and nothing while a file or a watched folder cannot be read."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("old.txt", "kept.txt"):
        (folder / name).write_text(f"The news of {name} are short.")
    assert run.on_store("ingest", str(folder)).code == 0
    (folder / "old.txt").rename(folder / "new.txt")
    (folder / "bad.txt").write_bytes(b"\x01")
    assert "nothing is pruned" in run.on_store("ingest", str(folder), "--prune").err
    (folder / "bad.txt").unlink()
    pruned = run.on_store("ingest", str(folder), "--prune")
    assert "deleted, since no source has them any more: old.txt" in pruned.err
    assert "2 unchanged, 1 deleted" in pruned.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert "nothing is pruned" in run.on_store("ingest", "-", "--prune").err
    monkeypatch.setattr(ingest, "_follow", lambda *_: IngestReport())
    (tmp_path / "unmounted").mkdir()
    run.on_store("ingest", str(folder), str(tmp_path / "unmounted"), "--watch", "--prune")
    listed = run("documents", "ls", "--store-dir", str(run.store), "--json").json["documents"]
    assert sorted(one["id"] for one in listed) == ["kept.txt", "new.txt"]  # type: ignore[attr-defined, index]


def end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the command's own
        os.kill(os.getpid(), signal.SIGTERM)


def test_watching_ends_at_sigterm(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--watch` stays, follows a file that comes later, and ends at SIGTERM with all closed and exit code 0.

    Files that cannot be used are listed once, and those that were mended meanwhile are no faults at the end.
    """
    pytest.importorskip("watchfiles", reason="needs the extra rag")
    monkeypatch.chdir(tmp_path)
    folder, notes, written = tmp_path / "notes", SimpleQueue[str](), 1
    folder.mkdir()
    (folder / "0.txt").write_text("The news of day 0 are short.")
    for name in ("bad.txt", "worse.txt"):
        (folder / name).write_bytes(b"\x01")
    note = terminal.note
    monkeypatch.setattr(terminal, "note", lambda text: (note(text), notes.put(text)))

    def new_documents(timeout_s: float) -> int:
        """Documents that the next note says are new; the command has counted them by then."""
        with suppress(Empty):
            found = re.search(r"(\d+) new", notes.get(timeout=timeout_s))
            return int(found[1]) if found else 0
        return 0

    def change_and_stop() -> None:
        nonlocal written
        try:
            while not notes.get(timeout=60).startswith("watching"):
                pass
            found, until = 1, time.monotonic() + 60
            while found == 1 and time.monotonic() < until:  # what comes before the watch begins is found by its next look
                (folder / f"{written}.txt").write_text(f"The news of day {written} are short.")
                written += 1
                found += new_documents(1)
            written += 1
            while found < written and time.monotonic() < until:
                (tmp_path / "mended.txt").write_text("It is mended.")
                (tmp_path / "mended.txt").replace(folder / "bad.txt")
                found += new_documents(1)
        finally:
            end_by_sigterm()

    changes = threading.Thread(target=change_and_stop)
    changes.start()
    ended = run.on_store("ingest", "notes", "--watch", "--json")
    changes.join()
    assert ended.code == 0
    assert "watching" in ended.err
    assert "stopped watching" in ended.err
    assert ended.err.count("worse.txt") == 1
    assert [Path(name).name for name in ended.json["faults"]] == ["worse.txt"]
    assert ended.json["added"] == written >= 3
    assert len(run("documents", "ls", "--store-dir", str(run.store), "--json").json["documents"]) == written
    refused = run.on_store("ingest", str(folder / "0.txt"), "--watch")
    assert (refused.code, "--watch follows folders" in refused.err) == (2, True)


@pytest.mark.parametrize(("options", "code"), [(["--watch"], 0), ([], 128 + signal.SIGTERM)], ids=["watching", "once"])
def test_sigterm_while_ingesting(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int
) -> None:
    """SIGTERM ends an ingest as Ctrl-C does, and says what stays; `--watch`, which nothing else ends, with exit code 0."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("The news are short.")
    ingested = Engine.ingest_stream

    def interrupted(*arguments: Any) -> IngestReport:
        end_by_sigterm()
        return ingested(*arguments)

    monkeypatch.setattr(Engine, "ingest_stream", interrupted)
    ended = run.on_store("ingest", str(tmp_path / "notes"), *options, "--json")
    assert (ended.code, ended.out) == (code, "")
    assert "interrupted; what was done is stored, and the same command goes on" in ended.err
