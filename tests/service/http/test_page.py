"""The page at `/` in a real browser, wide and as on a phone, by keyboard and by the names that a screen reader says."""

import json
import re
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api import MODEL, serving
from browser import NEEDS_BROWSER, ONCE, ask, fits, open_page
from engines import QUESTION, OpenEngine
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.http.server import Server

pytestmark = NEEDS_BROWSER
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
AXE = find_spec("axe_core_python")


@pytest.mark.usefixtures("_slowly")
def test_ask(page: Any, address: str, engine: Engine) -> None:
    """A question typed and sent by Enter is answered piece by piece, and compared with full prefill; bars and shaded
    tokens show what was recomputed, and a further question goes with the turn before it.
    """
    open_page(page, address)
    ask(page, QUESTION, 3, 30)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Chunks in the prompt").wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    expected = engine.answer(QUESTION, num_chunks=3, max_tokens=30)
    assert len({len(text) for text in page.evaluate("answers")}) > 5
    assert page.locator("#summary").inner_text() == "3 chunks from the store, 0 computed"
    assert page.locator("#cut").is_visible()
    assert re.match(r"blend at ratio 0.15: \d+ of \d+ reused tokens recomputed", page.locator("#how").text_content())
    page.locator("#gain_words", has_text=re.compile(r"first token after [\d.]+ s, with full prefill [\d.]+ s")).wait_for()
    assert re.fullmatch(r"[\d.]+ \u00d7", page.locator("#gain_number").inner_text())
    assert page.locator("#store").inner_text() == f"{MODEL}, over {engine.retriever.chunk_count} chunks"
    items, bars = page.locator("#chunks > li"), page.locator("#bars button")
    assert items.count() == bars.count() == 3
    for item, bar, scored in zip(items.all(), bars.all(), expected.chunks, strict=True):
        assert scored.chunk.title in item.get_by_role("heading").inner_text()
        assert not item.locator(".tokens").is_visible()
        told = re.search(r"KV from (RAM|NVMe); (\d+) tokens, (\d+) recomputed", item.inner_text())
        assert told, item.inner_text()
        assert int(told[2]) == len(scored.chunk.token_ids)
        assert item.locator("mark").count() == int(told[3])
        assert f"{told[3]} of {told[2]} tokens recomputed" in bar.get_attribute("aria-label")
        assert ("--glow" in bar.locator(".strip").get_attribute("style")) == (int(told[3]) > 0)
    shade = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(page.locator("#chunks mark").evaluate_all(shade))) > 1
    bars.nth(1).click()
    assert items.nth(1).locator("summary").evaluate("one => one === document.activeElement")
    assert items.nth(1).locator(".tokens").is_visible()
    assert "hit rate" in page.locator("#tiers").text_content()
    assert fits(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("textbox", name="Question").fill("And then?")
        page.keyboard.press("Enter")
    earlier = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": expected.text}]
    assert sent.value.post_data_json["messages"] == [*earlier, {"role": "user", "content": "And then?"}]
    page.locator("#with", has_text="goes with the 2 turns before it").wait_for()
    page.route("**/v1/chat/completions", lambda _: None)
    page.locator("#compare").click()
    page.locator("#examples button").first.click()
    assert page.locator("#compare").is_hidden(), "another question is asked"
    page.get_by_role("button", name="Start anew").click()
    assert page.locator("#answered").is_hidden()
    assert page.locator("#with").is_hidden()


@ONCE
def test_markdown(page: Any, address: str) -> None:
    """Markdown becomes elements; a link leads to the web alone, and what is no mark is text."""
    open_page(page, address)
    link = '<a href="https://a.example/b" target="_blank" rel="noopener noreferrer nofollow">'
    for text, shown in (
        ("# A `b`\n1 **two _3_**\nfour", "<h3>A <code>b</code></h3><p>1 <strong>two <em>3</em></strong>\nfour</p>"),
        ("2. a\n   - b\n\n3. c", '<ol start="2"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("|a|b|\n|-|-|\n|1|2|", "<div><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table></div>"),
        ("> a\n\n```x\n<b> *c*\n```", "<blockquote><p>a</p></blockquote><pre><code>&lt;b&gt; *c*</code></pre>"),
        (
            "[a](https://a.example/b) https://a.example/b. [c](javascript:d) ![e](data:f)",
            f"<p>{link}a</a> {link}https://a.example/b</a>. c e</p>",
        ),
        (MARKUP, f"<p>{MARKUP.replace('<', '&lt;').replace('>', '&gt;')}</p>"),
        ("snake_case_name 2 * 3 * 4 **", "<p>snake_case_name 2 * 3 * 4 **</p>"),
    ):
        made = page.evaluate(
            """async (text) => {
              const made = document.createElement("div");
              (await import("/markdown.js")).showMarkdown(made, text);
              return made.innerHTML;
            }""",
            text,
        )
        assert re.sub('</?span>| class="[a-z]+"', "", made.replace('<span class="said">', "")) == shown


@ONCE
def test_look_into_a_prompt(page: Any, open_engine: OpenEngine) -> None:
    """A prompt, or a request's JSON, is shown with what is taken for a passage, why, and whose KV is stored."""
    known, fresh = "The lamp of the harbour is green. " * 4, "It was said that it rains there. " * 4
    prompt = f"\U0001f50e Read.\n<source>{known}</source>\n<source>{fresh}</source>\nWhy?"
    engine = open_engine(chunk_tokens=192)
    engine.ingest([{"id": "lamps", "title": "", "text": known}])
    with serving(engine) as (_, address):
        open_page(page, address)
        page.get_by_text("Look into a prompt").click()
        chat = {"model": "m", "messages": [{"role": "system", "content": [{"type": "text", "text": prompt}]}]}
        chat["messages"].append({"role": "user", "content": "Why?"})
        for given, role in ((prompt, "user"), (json.dumps(chat), "system"), (json.dumps({"prompt": prompt}), "user")):
            page.get_by_role("textbox", name="Prompt").fill(given)
            page.get_by_role("button", name="Look").click()
            page.get_by_role("heading", name=role, exact=True).wait_for()
            stored, missing = page.locator("#looked mark").all()
            assert (stored.get_attribute("class"), missing.get_attribute("class")) == ("hit", "fresh")
            assert stored.evaluate("one => one.lastChild.data").strip() == known.strip()
            assert "word for word a stored chunk of lamps; KV stored" in stored.inner_text()
            assert missing.evaluate("one => one.lastChild.data").strip() == fresh.strip()
            assert "<source>; KV not stored yet" in missing.inner_text()
            assert "2 passages, 1 of them stored" in page.locator("#explained").inner_text()
        page.expected_faults = 1  # the browser's own line about a status of 400
        page.get_by_role("textbox", name="Prompt").fill('{"messages": []}')
        page.get_by_role("button", name="Look").click()
        page.locator("#explained", has_text="messages").wait_for()


@pytest.fixture
def _slowly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come so slowly that a browser with little of a processor sees their tokens come."""
    decode, pause = engine.fusor.decoder.decode, threading.Event()
    monkeypatch.setattr(engine.fusor.decoder, "decode", lambda *given: pause.wait(0.04) or decode(*given))


@ONCE
@pytest.mark.usefixtures("_slowly")
def test_stop(page: Any, address: str, server: Server) -> None:
    """Stop ends the answer in the middle, in the service too."""
    open_page(page, address)
    ask(page, QUESTION, 1, 380)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer:not(:empty)").wait_for()
    assert not page.locator(".after details").is_visible(), "it has nothing to show yet"
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("The answer was stopped.").wait_for()
    wait_until(lambda: server.scheduler.state.decoding == 0)
    wait_until(lambda: b'outcome="cancelled"} 1.0' in server.metrics.text())
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


@ONCE
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


@ONCE
def test_errors_are_told(page: Any, open_engine: OpenEngine) -> None:
    """What the service refuses, and a stream cut off before its end, stand in an alert; the next question is answered."""
    engine = open_engine()
    with serving(engine) as (_, address):
        page.expected_faults = 2  # the browser's own lines about a status of 400
        open_page(page, address)
        refusal = {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refusal))
        ask(page, QUESTION, 2)
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert "the prompt is too long" in page.get_by_role("alert").inner_text()
        page.unroute("**/v1/chat/completions")
        page.get_by_role("spinbutton", name="Chunks").fill("0")
        page.get_by_role("spinbutton", name="Tokens").fill("512")  # is refused, and asked again for what fits
        page.get_by_role("button", name="Ask").click()
        page.locator("#summary:not(:empty)").wait_for()
        assert page.get_by_role("alert").count() == 0
        assert "from none of your documents: there are none yet" in page.locator("#without").inner_text()
        page.get_by_role("textbox", name="Question").fill(QUESTION)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body='data: {"choices":[]}\n\n'))
        page.get_by_role("button", name="Ask").click()
        page.get_by_role("alert").filter(has_text="ended before").wait_for()


@ONCE
def test_connections_that_break(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A question whose connection breaks is asked twice; the second time, and for a file, the page says what to do."""
    (tmp_path / "notes.txt").write_text("The lamp is green.")
    lost: list[str] = []

    def lose(route: Any) -> None:
        lost.append(route.request.url)
        route.abort("connectionreset")

    with serving(open_engine()) as (_, address):
        open_page(page, address)
        page.route("**/v1/chat/completions", lose, times=1)
        ask(page, QUESTION, 0, 4)
        page.keyboard.press("Enter")
        page.locator("#summary:not(:empty)").wait_for()
        assert (len(lost), page.get_by_role("alert").count()) == (1, 0)
        page.route("**/v1/chat/completions", lose)
        page.route("**/v1/documents", lose)
        for runs, said in ((True, "broke off, though the service runs"), (False, "cannot be reached: it has stopped")):
            if not runs:
                page.route("**/healthz", lose)
            ask(page, QUESTION, 0, 4)
            page.keyboard.press("Enter")
            page.get_by_role("alert").filter(has_text=said).wait_for()
            assert page.get_by_role("textbox", name="Question").input_value() == QUESTION
            page.get_by_label("Add files").set_input_files([tmp_path / "notes.txt"])
            said = "notes.txt: the upload was cut off" if runs else f"notes.txt: the service {said}"
            page.get_by_text(said).wait_for()
        page.expected_faults = len(lost)  # the browser's own lines


@ONCE
def test_sentences_lead_to_their_chunks(page: Any, address: str) -> None:
    """A sentence has the number of the chunk that holds all of it, or has its figures and shares most words with it; it leads
    there. Figures that no such chunk has are marked.
    """
    open_page(page, address)
    ask(page, QUESTION, 4, 1)
    page.keyboard.press("Enter")
    page.locator("#chunks > li").nth(3).wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    for answer, number, doubted in (
        ("The lamp of Borealis is green. Nothing else.", "[2]", ""),
        ("18", "[2]", ""),
        ("- The answer is: **18**.", "[2]", ""),
        ("£1650", "[3]", ""),
        ("On the eighth day.", "[4]", ""),  # which holds all of it, though another one has as many of its words
        ("Wednesday", "[1]", ""),
        ("No.", "", ""),
        ("27", "", "27"),
        ("The green lamp stands in Borealis for 19 days, `18` or 18.", "", "19"),
        ("The green lamp stands in Borealis, says B18.", "", "B18"),
        ("The lamp stands in Borealis for 7 days.", "[5]", ""),  # the only one with the figure, though as a word
    ):
        page.evaluate(
            """async (answer) => {
              const { cite } = await import("/answer.js");
              const { showMarkdown } = await import("/markdown.js");
              const lamp = "the green lamp stands in Borealis for 18 days";
              const others = ["NOK 1,650, 18.5, 1.", "on the eighth day", "The lamp: seven."];
              const texts = ["No day, the eighth but Wednesday.", lamp, ...others];
              showMarkdown(document.getElementById("answer"), answer);
              cite(texts.map((text) => ({title: text, tokens: [{text}]})));
            }""",
            answer,
        )
        assert "".join(page.locator("#answer button").all_inner_texts()) == number, answer
        assert "".join(page.locator("#answer .doubt").all_inner_texts()) == doubted, answer
        if number == "[2]":
            page.locator("#answer button").click()
            assert page.locator("#chunks summary").nth(1).evaluate("one => one === document.activeElement")


@pytest.mark.skipif(AXE is None, reason="axe is not installed: pip install axe-core-python")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Any, address: str, scheme: str) -> None:
    """Nothing serious is found by axe, with an answer on the page, a look into a prompt, and all unfolded."""
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
        page.locator("details").evaluate_all("all => all.forEach((one) => one.open = true)")
        page.get_by_role("textbox", name="Prompt").fill(f"<source>{'It rains there. ' * 9}</source>\nWhy?")
        page.get_by_role("button", name="Look").click()
        page.locator("#looked mark").wait_for()
        found = page.evaluate(f"async () => {{ {source}; return (await axe.run()).violations; }}")
    serious = [
        (rule["id"], [node["html"] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
    assert not serious, serious


def text_of(engine: Engine, name: str) -> str:
    """The text of the documents of an uploaded file, each with its title."""
    ids = [document.id for document in engine.documents.page()[0] if document.id.partition("#")[0] == name]
    return "".join(chunk.text for id_ in ids for chunk, _ in engine.documents.show(id_)[1])


def test_documents(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A file is added, opened, asked about by an example question, and deleted after a question back."""
    notes, latin, empty = tmp_path / "notes.md", tmp_path / "latin.txt", tmp_path / "empty.txt"
    notes.write_text("# Lamps\n\nThe lamp of the harbour is green.\n", encoding="utf-8")
    latin.write_bytes("Café Müller opens at nine.".encode("latin-1"))
    empty.write_text(" ")
    engine = open_engine()
    with serving(engine) as (_, address):
        open_page(page, address)
        assert page.locator("#no_documents").is_visible()
        page.get_by_label("Add files").set_input_files([notes, latin, empty])
        page.get_by_role("button", name="latin.txt", exact=True).wait_for()
        page.get_by_text("empty.txt: empty; write something into it").wait_for()
        assert page.locator("#documents li").count() == 2
        assert "Café Müller" in text_of(engine, "latin.txt")
        page.get_by_role("button", name="Dismiss").click()
        assert page.locator("#uploads li").count() == 0
        page.get_by_text("notes.md, ").wait_for()  # beside the title
        page.get_by_role("button", name="Lamps", exact=True).click()
        assert "harbour" in page.get_by_role("dialog").inner_text()
        assert page.locator("#shown_title").evaluate(
            "one => one === document.activeElement && one.closest('dialog').scrollTop === 0"
        )
        page.keyboard.press("Escape")
        page.get_by_role("button", name="What is said about Lamps?").click()
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
        assert [document.title for document in engine.documents.page()[0]] == ["Lamps"]
        assert fits(page)


def test_a_file_of_a_known_name(page: Any, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The same file again adds nothing, and the page says so; another text of the name replaces the earlier one."""
    path = tmp_path / "notes.txt"
    path.write_text("The lamp is green.")
    engine = open_engine()

    def texts() -> list[str]:
        return [engine.documents.show(document.id)[1][0][0].text.partition("\n")[2] for document in engine.documents.page()[0]]

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
        (lines := tmp_path / "lines.jsonl").write_text('{"id": "a", "text": "The lamp is blue."}\n{\n')
        add.set_input_files([lines])
        page.get_by_text(re.compile(r"lines\.jsonl, line 2: not JSON .*\(1 fault\)")).wait_for()
        assert fits(page)


@ONCE
def test_files_are_dropped(page: Any, open_engine: OpenEngine) -> None:
    """A file that is dropped on the page is uploaded and listed."""
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
    """Two clicks list no document twice, one that is deleted is not read for that, and one is found by its name."""
    engine = open_engine()
    engine.ingest([{"id": f"d{number:02}", "title": "", "text": f"Text {number}."} for number in range(23)])
    with serving(engine) as (_, address):
        open_page(page, address)
        page.locator("#more").evaluate("one => { one.click(); one.click(); }")
        page.locator("#documents li").nth(22).wait_for()
        page.wait_for_load_state("networkidle")
        assert page.locator("#documents li").count() == 23
        page.get_by_role("searchbox").fill("D01 ")
        wait_until(lambda: page.locator("#documents li").count() == 1)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.method) if "/d01" in request.url else None)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete d01").click()
        page.get_by_role("button", name="d01", exact=True).wait_for(state="detached")
        assert asked == ["DELETE"]
        assert page.locator("#documents_title").evaluate("one => one === document.activeElement")
