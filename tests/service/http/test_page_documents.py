"""Documents on the page, in a real browser: added, listed, opened, pinned and deleted."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from api import MODEL, listening
from browser import NEEDS_BROWSER, ONCE, fits, open_page
from engines import OpenEngine
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.engine.config import write_examples
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

pytestmark = NEEDS_BROWSER


def text_of(engine: Engine, name: str) -> str:
    """The text of the documents of an uploaded file, each with its title."""
    ids = [document.id for document in engine.documents.ls() if document.id.partition("#")[0] == name]
    return "".join(chunk.text for id_ in ids for chunk in engine.documents.show(id_)[1])


def test_documents(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A file is added, opened, pinned, asked about by an example question, and deleted after a question back."""
    notes, latin, empty = tmp_path / "notes.md", tmp_path / "latin.txt", tmp_path / "empty.txt"
    notes.write_text("# Lamps\n\nThe lamp of the harbour is green.\n", encoding="utf-8")
    latin.write_bytes("Café Müller opens at nine.".encode("latin-1"))
    empty.write_text(" ")
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        page.expected_faults = 1  # the browser's own line about a status of 400
        open_page(page, address)
        assert page.locator("#no_documents").is_visible()
        page.get_by_label("Add files").set_input_files([notes, latin, empty])
        page.get_by_role("button", name="latin.txt", exact=True).wait_for()
        page.get_by_text("empty.txt: empty; write something into it").wait_for()
        assert page.locator("#documents li").count() == 2
        assert "Café Müller" in text_of(engine, "latin.txt")
        page.get_by_role("button", name="Dismiss").click()
        assert page.locator("#uploads li").count() == 0
        page.get_by_role("button", name="notes.md", exact=True).click()
        assert "harbour" in page.get_by_role("dialog").inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Pin notes.md").click()
        page.locator("[aria-pressed=true]").wait_for()
        assert [document.pinned for document in engine.documents.ls() if document.title == "notes"] == [True]
        page.get_by_role("button", name="What is said about notes?").click()
        page.locator("#summary:not(:empty)").wait_for()
        page.get_by_role("button", name="Delete latin.txt").click()
        page.get_by_role("dialog", name="Delete latin.txt?").get_by_role("button", name="Close").click()
        assert page.locator("#documents li").count() == 2
        page.get_by_role("button", name="Delete latin.txt").click()
        page.get_by_role("button", name="Delete it").click()
        wait_until(lambda: page.locator("#documents li").count() == 1)
        assert [document.title for document in engine.documents.ls()] == ["notes"]
        assert fits(page)


@ONCE
def test_files_of_any_encoding_and_of_lines(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """Texts of other encodings are read as what they are, and every line of a file of JSON lines is a document."""
    wide, cyrillic, lines = tmp_path / "wide.txt", tmp_path / "cyrillic.txt", tmp_path / "lines.jsonl"
    wide.write_text("The lamp of the harbour is green.", encoding="utf-16")
    russian = "Лампа в гавани горит зелёным светом всю ночь, и смотритель маяка записывает это в книгу. "
    cyrillic.write_bytes((russian * 4).encode("cp1251"))
    lines.write_text("".join(f'{{"title": "Lamp {number}", "text": "It is green."}}\n' for number in range(3)))
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.get_by_label("Add files").set_input_files([wide, cyrillic, lines])
        page.get_by_role("button", name="Lamp 2", exact=True).wait_for()
        assert text_of(engine, "wide.txt") == "wide\nThe lamp of the harbour is green."
        assert "гавани горит зелёным" in text_of(engine, "cyrillic.txt")
        assert [document.title for document in engine.documents.ls()][2:] == ["Lamp 0", "Lamp 1", "Lamp 2"]


def test_a_file_of_a_known_name(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The same file again adds nothing, and the page says so; another text of the name replaces the earlier one."""
    path = tmp_path / "notes.txt"
    path.write_text("The lamp is green.")
    engine = open_engine()

    def texts() -> list[str]:
        return [engine.documents.show(document.id)[1][0].text.partition("\n")[2] for document in engine.documents.ls()]

    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        add = page.get_by_label("Add files")
        add.set_input_files([path])
        page.get_by_role("button", name="notes.txt", exact=True).wait_for()
        add.set_input_files([path])
        page.get_by_text("notes.txt is there already, unchanged.").wait_for()
        dismiss = page.get_by_role("button", name="Dismiss: notes.txt")
        dismiss.focus()
        page.keyboard.press("Enter")
        dismiss.wait_for(state="detached")
        assert page.locator("#documents_title").evaluate("one => one === document.activeElement")
        assert (page.locator("#documents li").count(), texts()) == (1, ["The lamp is green."])
        path.write_text("The lamp is red.")
        add.set_input_files([path])
        wait_until(lambda: texts() == ["The lamp is red."])
        wait_until(lambda: page.locator("#uploads li").count() == 0)
        assert page.locator("#documents li").count() == 1
        assert fits(page)


@ONCE
def test_the_newest_are_listed_first(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """What is added to many documents shows up, and rows that were asked for stay after an upload and a deletion."""
    path = tmp_path / "new.txt"
    path.write_text("The lamp is green.")
    engine = open_engine()
    engine.ingest([{"id": f"d{number:02}", "title": "", "text": f"Text {number}."} for number in range(45)])
    rows = page.locator("#documents li")
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.get_by_role("button", name="Show more").click()
        rows.nth(39).wait_for()
        page.get_by_label("Add files").set_input_files([path])
        rows.first.get_by_role("button", name="new.txt", exact=True).wait_for()
        assert rows.count() == 40
        page.get_by_role("button", name="Delete new.txt").click()
        page.get_by_role("button", name="Delete it").click()
        rows.first.get_by_role("button", name="d44", exact=True).wait_for()
        page.wait_for_load_state("networkidle")
        assert rows.count() == 39


@ONCE
def test_examples_beside_the_store_come_first(page: Any, open_engine: OpenEngine) -> None:
    """Questions that stand beside the store are offered before those about titles, once there are documents."""
    engine = open_engine()
    write_examples(Path(engine.config.store_dir), ["Which lamp is green?", "<b>Where</b> is it?"])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.locator("#store", has_text="chunks").wait_for()
        assert page.locator("#examples button").count() == 0
        engine.ingest([{"id": str(number), "title": f"Lamp {number}", "text": "The lamp is green."} for number in range(3)])
        open_page(page, address)
        page.locator("#examples button").nth(2).wait_for()
        page.get_by_role("button", name="Which lamp is green?").wait_for()
        texts = page.locator("#examples button").all_inner_texts()
        assert texts == ["Which lamp is green?", "<b>Where</b> is it?", "What is said about Lamp 2?"]
        page.get_by_role("button", name="Which lamp is green?").click()
        page.locator("#summary:not(:empty)").wait_for()
        assert page.locator("#question").input_value() == "Which lamp is green?"


@ONCE
def test_an_upload_shows_its_chunks(
    page: Any, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of its kind says how many of its chunks are computed, and the bar is their share."""
    path, going_on = tmp_path / "lamps.txt", threading.Event()
    path.write_text("".join(f"The lamp of harbour {number} is green. " for number in range(40)))
    engine = open_engine()
    put, stored = engine.store.put, list[object]()

    def hold(*arguments: Any, **options: Any) -> Any:
        stored.append(arguments)
        if len(stored) == 3:
            going_on.wait(60)
        return put(*arguments, **options)

    monkeypatch.setattr(engine.store, "put", hold)
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.get_by_label("Add files").set_input_files([path])
        try:
            shown = page.get_by_text(re.compile(r"^lamps\.txt: 2 of \d+ chunks computed, \d+ s$"))
            shown.wait_for()
            total = int(shown.inner_text().split()[3])
            assert page.locator("#uploads progress").evaluate("one => one.value") == pytest.approx(2 / total)
        finally:
            going_on.set()
        page.get_by_role("button", name="lamps.txt", exact=True).wait_for()
        assert page.locator("#uploads li").count() == 0


def test_files_are_dropped(page: Any, open_engine: OpenEngine) -> None:
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.evaluate(
            """() => {
              const dataTransfer = new DataTransfer();
              dataTransfer.items.add(new File(["The lamp is green."], "dropped.txt", {type: "text/plain"}));
              const drop = new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true});
              document.getElementById("drop").dispatchEvent(drop);
            }"""
        )
        page.get_by_role("button", name="dropped.txt", exact=True).wait_for()


def test_a_file_to_convert(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """What is no plain text is converted, and what cannot be read says why."""
    pytest.importorskip("markitdown", reason="the extra [documents] is not installed")
    lamps, broken = tmp_path / "lamps.html", tmp_path / "broken.pdf"
    lamps.write_text("<h1>Lamps</h1><p>The lamp of the harbour is green.</p>")
    broken.write_bytes(b"%PDF-1.4 nothing")
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        page.expected_faults = 1  # the browser's own line about a status of 400
        open_page(page, address)
        page.get_by_label("Add files").set_input_files([lamps, broken])
        page.locator("#documents .open", has_text="lamps").wait_for()
        page.get_by_text("broken.pdf: ", exact=False).and_(page.locator(".failed")).wait_for()
        assert page.get_by_role("button", name="Try again").is_visible()
        assert page.locator("#documents li").count() == 1


def test_many_documents_come_in_parts(page: Any, open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.ingest([{"id": f"d{number:02}", "title": "", "text": f"Text {number}."} for number in range(23)])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        assert page.locator("#documents li").count() == 20
        page.get_by_role("button", name="Show more").click()
        wait_until(lambda: page.locator("#documents li").count() == 23)
        assert page.get_by_role("button", name="Show more").count() == 0


def test_a_file_of_pages_is_one_row(page: Any, open_engine: OpenEngine) -> None:
    """The pages of a file are one row, opened and deleted together."""
    engine = open_engine()
    engine.ingest([{"id": f"r.pdf#page={number}", "title": "", "text": f"Words of page {number}."} for number in range(1, 24)])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        assert "23 parts, 23 chunks" in page.locator("#documents li").inner_text()
        page.get_by_role("button", name="r.pdf", exact=True).click()
        assert "Words of page 23." in page.get_by_role("dialog").inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Delete r.pdf").click()
        page.get_by_role("button", name="Delete it").click()
        page.locator("#no_documents").wait_for()
        assert not engine.documents.ls()


@ONCE
def test_documents_in_a_hurry(page: Any, open_engine: OpenEngine) -> None:
    """Two clicks list no document twice, of a long document the first chunks are shown, and to delete one it is not read."""
    engine = open_engine()
    engine.ingest([{"id": f"d{number:02}", "title": "", "text": f"Text {number}."} for number in range(23)])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        open_page(page, address)
        page.locator("#more").evaluate("one => { one.click(); one.click(); }")
        page.locator("#documents li").nth(22).wait_for()
        page.wait_for_load_state("networkidle")
        assert page.locator("#documents li").count() == 23
        content = [{"text": f"chunk {number}"} for number in range(10_000)]
        shown = {"id": "d00", "chunks": 10_000, "stored_chunks": 0, "stored_bytes": 0, "content": content}
        page.route("**/v1/documents/d00", lambda route: route.fulfill(json=shown))
        page.get_by_role("button", name="d00", exact=True).click()
        page.get_by_role("dialog").wait_for()
        assert page.locator("#shown_text pre").count() == 100
        page.get_by_role("dialog").get_by_role("button", name="Show more").click()
        assert page.locator("#shown_text pre").count() == 200
        page.keyboard.press("Escape")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.method) if "/d01" in request.url else None)
        page.get_by_role("button", name="Pin d01").click()
        page.get_by_role("button", name="Pinned d01").wait_for()
        page.get_by_role("button", name="Delete d01").click()
        page.get_by_role("button", name="Delete it").click()
        page.get_by_role("button", name="d01", exact=True).wait_for(state="detached")
        assert asked == ["POST", "DELETE"]
        assert page.locator("#documents_title").evaluate("one => one === document.activeElement")
