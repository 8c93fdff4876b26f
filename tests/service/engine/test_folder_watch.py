"""Folders that are followed: what comes, changes and goes, and what is never touched."""

import json
import os
import shutil
from pathlib import Path

import pytest
from engines import OpenEngine

from cacheblend.base.errors import InputError, RetrieverError, StoreFullError
from cacheblend.service import Engine
from cacheblend.service.engine.documents import Documents
from cacheblend.service.engine.folder_watch import RECORD_FILE, FolderWatch, check_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts and a file of two documents."""
    made = tmp_path / "notes"
    (made / "sub").mkdir(parents=True)
    (made / "boats.md").write_text("# Boats\n\nThe red boat leaves at nine.\n")
    (made / "sub" / "trains.txt").write_text("The night train has no dining car.\n")
    lines(made / "rooms.jsonl", one="The green room is upstairs.", two="The blue room is downstairs.")
    return made


def text_of(engine: Engine, id_: str) -> str:
    return "".join(chunk.text for chunk, _ in engine.documents.show(id_)[1])


def lines(path: Path, **texts: str) -> None:
    path.write_text("".join(json.dumps({"id": id_, "text": text}) + "\n" for id_, text in texts.items()))


def ids(engine: Engine) -> set[str]:
    return {document.id for document in engine.documents.page()[0]}


def test_following(open_engine: OpenEngine, folder: Path) -> None:
    """New, changed (by size or time) and deleted files and parts of files are followed; others are not read again."""
    engine = open_engine()
    watch = FolderWatch(engine, [str(folder)])
    first = watch.follow()
    assert (first.ingested.added, first.ingested.deleted, first.faults) == (4, 0, {})
    assert ids(engine) == {"boats.md", "sub/trains.txt", "one", "two"}
    assert engine.documents.status("boats.md").stored_chunks > 0
    assert not watch.follow()
    (folder / "boats.md").write_text("# Boats\n\nThe white boat leaves at ten o'clock.\n")
    (folder / "sub" / "trains.txt").unlink()
    (folder / "new.txt").write_text("Bicycles stay outside.\n")
    lines(folder / "rooms.jsonl", one="The green room is upstairs.", three="The red room is closed.")
    second = watch.follow()
    assert (second.ingested.added, second.ingested.replaced, second.ingested.deleted) == (2, 1, 2)
    assert ids(engine) == {"boats.md", "new.txt", "one", "three"}
    assert "white boat" in text_of(engine, "boats.md")
    assert not watch.follow()
    before = (folder / "boats.md").stat()
    (folder / "boats.md").write_text("# Boats\n\nThe brown boat leaves at ten o'clock.\n")
    os.utime(folder / "boats.md", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert (folder / "boats.md").stat().st_size == before.st_size
    assert watch.follow().ingested.replaced == 1
    assert "brown boat" in text_of(engine, "boats.md")


def test_a_moved_file_keeps_its_kv(open_engine: OpenEngine, folder: Path) -> None:
    """Under its new name nothing of it is computed, since what it was goes last."""
    engine = open_engine()
    (folder / "titled.jsonl").write_text(json.dumps({"id": "a", "title": "t", "text": "Some words."}))
    watch = FolderWatch(engine, [str(folder)])
    watch.follow()
    (folder / "titled.jsonl").write_text(json.dumps({"id": "b", "title": "t", "text": "Some words."}))
    report = watch.follow()
    assert (report.ingested.added, report.ingested.computed, report.ingested.deleted) == (1, 0, 1)
    assert engine.documents.status("b").stored_chunks == 1


def test_what_goes_while_nobody_watches(open_engine: OpenEngine, folder: Path) -> None:
    """The next watch deletes it, by the record that all watches share; without a record nothing is deleted."""
    engine = open_engine()
    watch = FolderWatch(engine, [str(folder / "sub")])
    FolderWatch(engine, [str(folder)]).follow()
    watch.follow()
    (folder / "boats.md").unlink()
    assert FolderWatch(engine, [str(folder)]).follow().ingested.deleted == 1
    assert "boats.md" not in ids(engine)
    (engine.config.store_dir / RECORD_FILE).write_text('{"notes": 3}')
    (folder / "sub" / "trains.txt").unlink()
    assert FolderWatch(engine, [str(folder)]).follow().ingested.deleted == 0
    assert "sub/trains.txt" in ids(engine)


def test_others_documents_stay(open_engine: OpenEngine, folder: Path, tmp_path: Path) -> None:
    """Documents from elsewhere are never deleted: neither with another id, nor the folder's ids with another text, nor those
    that stand in another watched file; nor is anything where the whole folder is away.
    """
    engine = open_engine()
    engine.ingest([{"id": "mine", "text": "Brought by somebody else."}])
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(folder / "boats.md", other)
    watch = FolderWatch(engine, [str(folder), str(other)])
    watch.follow()
    engine.ingest([{"id": "sub/trains.txt", "text": "Replaced by somebody else."}])
    (folder / "boats.md").unlink()
    (folder / "sub" / "trains.txt").unlink()
    assert watch.follow().ingested.deleted == 0
    shutil.move(folder, tmp_path / "away")
    assert watch.follow().ingested.deleted == 0
    assert ids(engine) == {"mine", "boats.md", "sub/trains.txt", "one", "two"}


def test_files_that_cannot_be_used(open_engine: OpenEngine, folder: Path) -> None:
    """A file that is broken for a while keeps its document, is told once, and its repair is followed; so with two of one id."""
    engine = open_engine()
    watch = FolderWatch(engine, [str(folder)])
    watch.follow()
    (folder / "boats.md").write_bytes(b"\0\0")
    lines(folder / "double.jsonl", one="Another text for one.")
    report = watch.follow()
    assert {Path(name).name for name in report.faults} == {"boats.md", "double.jsonl"}
    assert "has a document of the id 'one'" in report.faults[str(folder / "double.jsonl")]
    assert ids(engine) >= {"boats.md", "one"}
    assert not watch.follow()
    (folder / "boats.md").write_text("The boat is mended.")
    assert watch.follow().ingested.replaced == 1
    (folder / "rooms.jsonl").write_text('{"id": "one", "text": "Red."}\n{"id": "one", "text": "Blue."}\n{"id": "two", "te')
    assert watch.follow().ingested.deleted == 0
    assert "Red" in text_of(engine, "one")
    lines(folder / "rooms.jsonl", one="The green room is upstairs.")
    assert watch.follow().ingested.deleted == 1
    assert "two" not in ids(engine)


def test_two_folders_with_one_name(open_engine: OpenEngine, folder: Path, tmp_path: Path) -> None:
    """Of two files with one id and different texts the first stays; the other is taken once that is gone, in either folder."""
    engine, other = open_engine(), tmp_path / "other"
    other.mkdir()
    (other / "boats.md").write_text("# Boats\n\nThe black boat never leaves.\n")
    (other / "stays.md").write_text("Stays.")
    watch = FolderWatch(engine, [str(folder), str(other)])
    assert "has a document of the id 'boats.md'" in watch.follow().faults[str(other / "boats.md")]
    assert "red boat" in text_of(engine, "boats.md")
    again = FolderWatch(engine, [str(folder), str(other)])
    assert list(again.follow().faults) == [str(other / "boats.md")]
    assert not again.follow()
    text = (folder / "boats.md").read_text()
    (folder / "boats.md").unlink()
    report = again.follow()
    assert (report.ingested.replaced, report.ingested.deleted, again.faults) == (1, 0, {})
    assert "black boat" in text_of(engine, "boats.md")
    (folder / "boats.md").write_text(text)
    assert list(again.follow().faults) == [str(folder / "boats.md")]
    (other / "boats.md").unlink()
    assert again.follow().ingested.deleted == 0
    assert "red boat" in text_of(engine, "boats.md")
    (other / "stays.md").rename(tmp_path / "stays.md")  # an unmounted folder is empty
    assert not again.follow()


@pytest.mark.parametrize("error", [StoreFullError("full"), OSError(28, "No space left on device"), RetrieverError("silent")])
def test_passing_errors(open_engine: OpenEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What meets a full disk or a silent index is told once, and followed when that is over."""
    engine = open_engine()
    watch = FolderWatch(engine, [str(folder)])
    watch.follow()
    (folder / "boats.md").write_text("# Boats\n\nThe white boat leaves at ten o'clock.\n")
    (folder / "sub" / "trains.txt").unlink()
    lines(folder / "rooms.jsonl", one="The green room is upstairs.")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "ingest_stream", fail)
        patch.setattr(Documents, "remove", fail)
        report = watch.follow()
        assert {Path(name).name for name in report.faults} == {"boats.md", "trains.txt", "rooms.jsonl"}
        assert not watch.follow()
        assert "red boat" in text_of(engine, "boats.md")
    report = watch.follow()
    assert (report.ingested.replaced, report.ingested.deleted, watch.faults) == (1, 2, {})
    assert ids(engine) == {"boats.md", "one"}


def test_what_is_not_watched(tmp_path: Path) -> None:
    """No file, and no folder with the store in it."""
    (tmp_path / "file.txt").write_text("text")
    for source in (tmp_path / "file.txt", tmp_path):
        with pytest.raises(InputError, match="--watch"):
            check_folders([str(source)], tmp_path / "store")
    check_folders([str(tmp_path)], tmp_path.parent / "elsewhere")
