"""The page at `/` in a real browser, wide and as on a phone, by keyboard and by the names that a screen reader says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api import serving
from browser import NEEDS_BROWSER, ONCE, ask, fits, open_page
from engines import QUESTION, OpenEngine
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.engine.config import write_examples
from cacheblend.service.http.server import Server

pytestmark = NEEDS_BROWSER
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
AXE = find_spec("axe_core_python")


def test_ask(page: Any, address: str, engine: Engine) -> None:
    """A question typed and sent by Enter is answered piece by piece; bars and shaded tokens show what was recomputed."""
    open_page(page, address)
    ask(page, QUESTION, 3, 30)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Chunks in the prompt").wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    expected = engine.answer(QUESTION, num_chunks=3, max_tokens=30)
    shown = page.locator("#answer").evaluate(
        "one => [...one.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join('')"
    )
    assert shown == expected.text
    assert len({len(text) for text in page.evaluate("answers")}) > 5
    assert re.search(r"blend at ratio 0.15: first token after \d+\.\d+ s; 3 chunks", page.locator("#summary").inner_text())
    items, bars = page.locator("#chunks > li"), page.locator("#bars button")
    assert items.count() == bars.count() == 3
    for item, bar, scored in zip(items.all(), bars.all(), expected.chunks, strict=True):
        assert scored.chunk.title in item.get_by_role("heading").inner_text()
        told = re.search(r"KV from (RAM|NVMe); (\d+) tokens, (\d+) recomputed", item.inner_text())
        assert told, item.inner_text()
        assert int(told[2]) == len(scored.chunk.token_ids)
        assert item.locator("mark").count() == int(told[3])
        assert f"{told[3]} of {told[2]} tokens recomputed" in bar.get_attribute("aria-label")
        assert ("--glow" in bar.locator(".strip").get_attribute("style")) == (int(told[3]) > 0)
    shade = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(page.locator("#chunks mark").evaluate_all(shade))) > 1
    bars.nth(1).click()
    assert items.nth(1).evaluate("one => one === document.activeElement")
    assert "hit rate" in page.locator("#store").inner_text()
    assert fits(page)


def test_stop(page: Any, address: str, server: Server) -> None:
    """Stop ends the answer in the middle, in the service too."""
    open_page(page, address)
    ask(page, QUESTION, 1, 380)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: server.scheduler.state.decoding == 0)
    assert b'outcome="cancelled"} 1.0' in server.metrics.text()
    assert page.get_by_role("alert").count() == 0


def test_text_is_never_markup(page: Any, address: str, engine: Engine) -> None:
    """A document's title and text are shown as they are, whatever they hold."""
    engine.ingest([{"id": "markup", "title": MARKUP, "text": MARKUP}])
    open_page(page, address)
    ask(page, MARKUP, 2)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=MARKUP).first.wait_for()
    page.get_by_role("button", name=MARKUP, exact=True).click()
    page.get_by_role("dialog", name=MARKUP).wait_for()
    assert "onerror" in page.locator("#shown_text").inner_text()
    assert page.title() == "CacheBlend"
    assert page.locator("main img").count() == page.locator("main script").count() == page.locator("dialog img").count() == 0
    assert fits(page)


def test_key(page: Any, open_engine: OpenEngine) -> None:
    """Where the service wants a key, the page asks for it, and keeps it for the tab alone."""
    engine = open_engine()
    with serving(engine, api_key="cb-secret") as (_, address):
        page.expected_faults = 2  # the browser's own lines about 401
        page.goto(address)
        page.get_by_label("API key").first.wait_for()
        page.locator("#key").fill("“cb-secret”")  # which no header can carry: stored, it would fail every request of the tab
        assert not page.locator("#key").evaluate("one => one.checkValidity()")
        page.locator("#key").fill(" cb-secret ")
        page.get_by_role("button", name="Use it").click()
        page.locator("#no_documents:not([hidden])").wait_for()
        assert page.locator("#key_form").is_hidden()
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]


def test_errors_are_told(page: Any, open_engine: OpenEngine) -> None:
    """What the service refuses, and a stream cut off before its end, stand in an alert; the next question is answered."""
    engine = open_engine()
    with serving(engine) as (_, address):
        page.expected_faults = 1  # the browser's own line about a status of 400
        open_page(page, address)
        refusal = {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refusal))
        ask(page, QUESTION, 2)
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert "the prompt is too long" in page.get_by_role("alert").inner_text()
        page.unroute("**/v1/chat/completions")
        page.get_by_role("spinbutton", name="Chunks").fill("0")
        page.get_by_role("button", name="Ask").click()
        page.locator("#summary:not(:empty)").wait_for()
        assert page.get_by_role("alert").count() == 0
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body='data: {"choices":[]}\n\n'))
        page.get_by_role("button", name="Ask").click()
        page.get_by_role("alert").filter(has_text="ended before").wait_for()


@ONCE
def test_sentences_lead_to_their_chunks(page: Any, address: str) -> None:
    """A sentence has the number of the chunk that holds all of it, or shares most words and figures with it; it leads there."""
    open_page(page, address)
    ask(page, QUESTION, 4, 1)
    page.keyboard.press("Enter")
    page.locator("#chunks > li").nth(3).wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    for answer, number in (
        ("The lamp of Borealis is green. Nothing else.", "[2]"),
        ("18", "[2]"),
        ("The answer is: 18.", "[2]"),
        ("£1,650", "[3]"),
        ("On the eighth day.", "[4]"),  # which holds all of it, though another one has as many of its words
        ("Wednesday", "[1]"),
        ("No.", ""),
        ("27", ""),
    ):
        page.evaluate(
            """async (answer) => {
              const { cite } = await import("/answer.js");
              const lamp = "the green lamp stands in Borealis for 18 days";
              const texts = ["No day, the eighth but Wednesday.", lamp, "NOK 1,650, 18.5, 1.", "on the eighth day"];
              document.getElementById("answer").textContent = answer;
              cite(texts.map((text) => ({title: text, tokens: [{text}]})));
            }""",
            answer,
        )
        assert "".join(page.locator("#answer button").all_inner_texts()) == number, answer
        if number == "[2]":
            page.locator("#answer button").click()
            assert page.locator("#chunks > li").nth(1).evaluate("one => one === document.activeElement")


@pytest.mark.skipif(AXE is None, reason="axe is not installed: pip install axe-core-python")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Any, address: str, scheme: str) -> None:
    """Nothing serious is found by axe, with an answer on the page."""
    assert AXE is not None
    assert AXE.origin is not None
    source = next(Path(AXE.origin).parent.rglob("axe.min.js")).read_text(encoding="utf-8")
    with browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, reduced_motion="reduce") as context:
        page = context.new_page()
        open_page(page, address)
        ask(page, QUESTION, 3, 8)
        page.get_by_role("button", name="Ask", exact=True).click()
        page.locator("#chunks > li").nth(2).wait_for()
        page.locator("#answer[aria-busy=false]").wait_for()
        found = page.evaluate(f"async () => {{ {source}; return (await axe.run()).violations; }}")
    serious = [
        (rule["id"], [node["html"] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
    assert not serious, serious


def text_of(engine: Engine, name: str) -> str:
    """The text of the documents of an uploaded file, each with its title."""
    ids = [document.id for document in engine.documents.ls() if document.id.partition("#")[0] == name]
    return "".join(chunk.text for id_ in ids for chunk, _ in engine.documents.show(id_)[1])


def test_documents(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A file is added, opened, pinned, asked about by an example question, and deleted after a question back."""
    notes, latin, empty = tmp_path / "notes.md", tmp_path / "latin.txt", tmp_path / "empty.txt"
    notes.write_text("# Lamps\n\nThe lamp of the harbour is green.\n", encoding="utf-8")
    latin.write_bytes("Café Müller opens at nine.".encode("latin-1"))
    empty.write_text(" ")
    engine = open_engine()
    with serving(engine) as (_, address):
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
        page.get_by_role("button", name="What is said about notes?").click()
        page.locator("#summary:not(:empty)").wait_for()
        asked: list[str] = []

        def answer(dialog: Any) -> None:  # first no, then yes
            asked.append(dialog.message)
            (dialog.accept if len(asked) > 1 else dialog.dismiss)()

        page.on("dialog", answer)
        page.get_by_role("button", name="Delete latin.txt").click()
        assert page.locator("#documents li").count() == 2
        page.get_by_role("button", name="Delete latin.txt").click()
        wait_until(lambda: page.locator("#documents li").count() == 1)
        assert [document.title for document in engine.documents.ls()] == ["notes"]
        assert fits(page)


def test_a_file_of_a_known_name(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The same file again adds nothing, and the page says so; another text of the name replaces the earlier one."""
    path = tmp_path / "notes.txt"
    path.write_text("The lamp is green.")
    engine = open_engine()

    def texts() -> list[str]:
        return [engine.documents.show(document.id)[1][0][0].text.partition("\n")[2] for document in engine.documents.ls()]

    with serving(engine) as (_, address):
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
def test_examples_beside_the_store_come_first(page: Any, open_engine: OpenEngine) -> None:
    """Questions that stand beside the store are offered before those about titles, once there are documents."""
    engine = open_engine()
    write_examples(Path(engine.config.store_dir), ["Which lamp is green?", "<b>Where</b> is it?"])
    with serving(engine) as (_, address):
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


def test_files_are_dropped(page: Any, open_engine: OpenEngine) -> None:
    engine = open_engine()
    with serving(engine) as (_, address):
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


@ONCE
def test_documents_in_a_hurry(page: Any, open_engine: OpenEngine) -> None:
    """Two clicks list no document twice, and one that is deleted is not read for that."""
    engine = open_engine()
    engine.ingest([{"id": f"d{number:02}", "title": "", "text": f"Text {number}."} for number in range(23)])
    with serving(engine) as (_, address):
        open_page(page, address)
        page.locator("#more").evaluate("one => { one.click(); one.click(); }")
        page.locator("#documents li").nth(22).wait_for()
        page.wait_for_load_state("networkidle")
        assert page.locator("#documents li").count() == 23
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.method) if "/d01" in request.url else None)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete d01").click()
        page.get_by_role("button", name="d01", exact=True).wait_for(state="detached")
        assert asked == ["DELETE"]
        assert page.locator("#documents_title").evaluate("one => one === document.activeElement")
