"""The page at `/` in a real browser, wide and as on a phone, by keyboard and by the names that a screen reader says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api import MODEL, listening
from browser import NEEDS_BROWSER, ONCE, ask, fits, open_page
from engines import QUESTION, OpenEngine
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.engine.config import write_examples
from cacheblend.service.http.app import STATIC
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key
from cacheblend.service.http.guard import PAGE_FILES
from cacheblend.service.http.server import Server

pytestmark = NEEDS_BROWSER
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
AXE = find_spec("axe_core_python")
MAX_BYTES = 100_000  # of the first view


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    engine.ingest([{"id": "markup", "title": MARKUP, "text": MARKUP}])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server:
        yield server


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    with listening(server) as address:
        yield address


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
        assert (bar.locator(".lit").count() > 0) == (int(told[3]) > 0)
    shades = {page.locator(f"mark.d{rank}").first.evaluate("one => getComputedStyle(one).backgroundColor") for rank in (0, 3)}
    assert len(shades) == 2
    bars.nth(1).click()
    assert items.nth(1).evaluate("one => one === document.activeElement")
    assert "hit rate" in page.locator("#store").inner_text()
    assert fits(page)


def test_sentences_lead_to_their_chunks(page: Any, address: str) -> None:
    """A sentence that shares words with a chunk has its number, and the number leads there."""
    open_page(page, address)
    ask(page, QUESTION, 3, 1)
    page.keyboard.press("Enter")
    page.locator("#answer[aria-busy=false]").wait_for()
    page.locator("#chunks > li").nth(2).wait_for()
    page.evaluate(
        """async () => {
          const { cite } = await import("/answer.js");
          const chunk = (text) => ({title: text, tokens: [{text}]});
          document.getElementById("answer").textContent = "The lamp of Borealis is green. Nothing else.";
          cite([chunk("about other things"), chunk("the green lamp stands in Borealis"), chunk("green")]);
        }"""
    )
    numbers = page.locator("#answer button")
    assert numbers.all_inner_texts() == ["[2]"]
    assert numbers.first.get_attribute("aria-label").startswith("Source 2")
    numbers.first.click()
    assert page.locator("#chunks > li").nth(1).evaluate("one => one === document.activeElement")


@pytest.fixture
def ordinary_page(browser: Any) -> Iterator[Callable[[int, int], Any]]:
    """A page in a window of any size."""
    with ExitStack() as opened:

        def open_one(width: int, height: int) -> Any:
            context = opened.enter_context(browser.new_context(viewport={"width": width, "height": height}))
            page = context.new_page()
            page.set_default_timeout(20_000)
            return page

        yield open_one


def test_the_strip_is_above_the_fold(ordinary_page: Callable[[int, int], Any], address: str, engine: Engine) -> None:
    """With six chunks the answer and the whole strip are seen at 1280 x 800 without scrolling."""
    write_examples(Path(engine.config.store_dir), [f"{QUESTION} {number} {QUESTION}" for number in range(3)])
    page = ordinary_page(1280, 800)
    open_page(page, address)
    ask(page, QUESTION, 6, 8)
    page.locator("#ask details").evaluate("one => one.open = false")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#bars li").nth(5).wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    assert page.evaluate("scrollY") == 0
    assert page.locator("#examples button").count() == 3
    assert fits(page)
    for part in ("#strip", "#answer", "#summary"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 800, part


def test_a_phone_shows_answer_and_strip(ordinary_page: Callable[[int, int], Any], address: str) -> None:
    """On a phone the button is seen at once, and an answer comes into view."""
    page = ordinary_page(360, 740)
    open_page(page, address)
    button = page.get_by_role("button", name="Ask", exact=True).bounding_box()
    assert button["y"] + button["height"] <= 740
    ask(page, QUESTION, 6, 8)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#bars li").nth(5).wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    for part in ("#answer", "#bars li:first-child", "#bars li:last-child"):
        box = page.locator(part).bounding_box()
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 740, part


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


def test_text_is_never_markup(page: Any, address: str) -> None:
    """A document's title and text are shown as they are, whatever they hold."""
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
    tenants = [TenantConfig(name="a", api_key_sha256=(hash_key("cb-secret"),))]
    http = HttpConfig(served_model_name=MODEL)
    with (
        Server(engine.config, http=http, tenants=tenants, embedder=engine.retriever.embedder) as server,
        listening(server) as address,
    ):
        page.expected_faults = 2  # the browser's own lines about 401
        page.goto(address)
        page.get_by_label("API key").first.wait_for()
        page.locator("#key").fill("cb-secret")
        page.get_by_role("button", name="Use it").click()
        page.locator("#no_documents:not([hidden])").wait_for()
        assert page.locator("#key_form").is_hidden()
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]


def test_errors_are_told(page: Any, open_engine: OpenEngine) -> None:
    """What the service refuses stands in an alert, with its words, and the next question is answered all the same."""
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        page.expected_faults = 1  # the browser's own line about a status of 400
        open_page(page, address)
        ask(page, QUESTION, 2)
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert "no documents" in page.get_by_role("alert").inner_text()
        page.get_by_role("spinbutton", name="Chunks").fill("0")
        page.get_by_role("button", name="Ask").click()
        page.locator("#summary:not(:empty)").wait_for()
        assert page.get_by_role("alert").count() == 0


@ONCE
def test_citing_loses_nothing(page: Any, address: str) -> None:
    """Numbers stand between sentences, not in a figure, and what begins with a full stop keeps it."""
    open_page(page, address)
    text = "The lamp of Borealis is 3.5 m high, built in .NET. ...Nothing else!\n\nThe lamp of Borealis."
    children = page.evaluate(
        """async (text) => {
          const { cite } = await import("/answer.js");
          document.getElementById("answer").textContent = text;
          cite([{title: "lamps", tokens: [{text: "lamp of Borealis"}]}]);
          return [...document.getElementById("answer").childNodes].map((n) => n.textContent);
        }""",
        text,
    )
    first, number, *others = children
    assert (first, number) == ("The lamp of Borealis is 3.5 m high, built in .NET. ", "[1]")
    assert "".join([first, *others]).replace("[1]", "") == text


@ONCE
@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("18", "[2]"),
        ("18.", "[2]"),
        ("The answer is: 18.", "[2]"),
        ("£1,650", "[3]"),
        ("On the eighth day.", "[4]"),  # which holds all of it, though another one has as many of its words
        ("Wednesday", "[1]"),
        ("No.", ""),
        ("27", ""),
    ],
)
def test_short_answers_have_their_number(page: Any, address: str, answer: str, number: str) -> None:
    """A figure or a single word leads to the chunk that holds it, and to none where no chunk does."""
    open_page(page, address)
    page.evaluate(
        """async (answer) => {
          const { cite } = await import("/answer.js");
          const texts = ["No day, the eighth but Wednesday.", "Leave of 18 days", "NOK 1,650, 18.5, 1.", "on the eighth day"];
          document.getElementById("answer").textContent = answer;
          cite(texts.map((text) => ({title: text, tokens: [{text}]})));
        }""",
        answer,
    )
    assert "".join(page.locator("#answer button").all_inner_texts()) == number


@ONCE
def test_a_list_has_no_number_for_its_numbers(page: Any, address: str) -> None:
    """The figure that counts a list's items is no sentence of its own."""
    open_page(page, address)
    page.evaluate(
        """async () => {
          const { cite } = await import("/answer.js");
          document.getElementById("answer").textContent = "1. The green lamp.\\n2. Nothing.";
          cite(["2 of 1", "the green lamp"].map((text) => ({title: text, tokens: [{text}]})));
        }"""
    )
    assert page.locator("#answer").evaluate("one => one.textContent") == "1. The green lamp.\n[2]2. Nothing."


@ONCE
def test_shades_are_quarters(page: Any, address: str) -> None:
    """The recomputed tokens of all chunks stand in four shades by their rank; those of one deviation have one shade."""
    open_page(page, address)
    deviations = [*range(1, 9), 8]
    shades = page.evaluate(
        """async (deviations) => {
          const { showChunks } = await import("/answer.js");
          const tokens = deviations.map((deviation) => ({text: "x", recomputed: 1, deviation}));
          showChunks([{title: "t", source: "ram", position: 0, tokens}]);
          return [...document.querySelectorAll("#chunks mark")].map((mark) => mark.classList[0]);
        }""",
        deviations,
    )
    order = sorted(deviations)
    assert shades == [f"d{4 * order.index(deviation) // len(order)}" for deviation in deviations]


@ONCE
def test_an_answer_cut_off_is_an_error(page: Any, address: str) -> None:
    """A stream that ends without its mark was cut, and the page says so."""
    open_page(page, address)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body='data: {"choices":[]}\n\n'))
    ask(page, QUESTION, 1)
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="ended before").wait_for()


@ONCE
def test_enter_in_a_composition_sends_nothing(page: Any, address: str) -> None:
    """The Enter that ends an input method's word is no question; a wrong option is shown, though its field was folded."""
    open_page(page, address)
    ask(page, QUESTION, 99)
    page.locator("#ask details").evaluate("one => one.open = false")
    enter = "(one) => one.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: %s, cancelable: true}))"
    assert page.locator("#question").evaluate(enter % "true")
    assert not page.locator("#ask details").evaluate("one => one.open")
    page.keyboard.press("Enter")
    assert page.locator("#ask details").evaluate("one => one.open")
    assert page.locator("#num_chunks").evaluate("one => one === document.activeElement")


@ONCE
def test_a_key_is_plain(page: Any, address: str) -> None:
    """A key that no header can carry is refused in its field; kept, it would fail every request of the tab."""
    open_page(page, address)
    page.locator("#key_form").evaluate("one => one.hidden = false")
    for key, taken in (("“cb-key”", False), (" cb-key_9 ", True)):
        page.locator("#key").fill(key)
        assert page.locator("#key").evaluate("one => one.checkValidity()") is taken


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


def test_first_view_is_small() -> None:
    assert sum((STATIC / name).stat().st_size for name in PAGE_FILES.values()) < MAX_BYTES
