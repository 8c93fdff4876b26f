"""The page at `/` in a real browser, wide and as on a phone, by keyboard and by the names that a screen reader says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from api import MODEL, listening
from engines import QUESTION, OpenEngine, wait_until

from cacheblend.service import Engine
from cacheblend.service.http import HttpConfig, Server

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: apt-get install chromium")
WIDE, PHONE = (1280, 900), (390, 844)
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
# Every state of the answer that the page shows.
WATCH_ANSWER = """
window.answers = [];
document.addEventListener("DOMContentLoaded", () => {
  const answer = document.getElementById("answer");
  new MutationObserver(() => answers.push(answer.textContent)).observe(answer, {childList: true});
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])  # containers run as root
        yield browser
        browser.close()


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A page of a browser in which no script fails and nothing is blocked."""
    width, height = request.param
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.add_init_script(WATCH_ANSWER)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
        page.expected_faults = 0
        yield page
        assert len(faults) == page.expected_faults, faults


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    engine.ingest([{"id": "markup", "title": MARKUP, "text": MARKUP}])
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server:
        yield server


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    with listening(server) as address:
        yield address


def open_page(page: Any, address: str) -> None:
    page.goto(address)
    page.get_by_role("combobox", name="Method").get_by_role("option", name="blend").wait_for(state="attached")


def fits(page: Any) -> bool:
    """Whether nothing stands out of the window to the right."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    return bool(wide <= window)


def test_ask(page: Any, address: str, engine: Engine) -> None:
    """A question typed and sent by Enter is answered piece by piece, and each chunk shows its KV's source and shaded tokens."""
    open_page(page, address)
    page.get_by_role("spinbutton", name="Chunks").fill("3")
    page.get_by_role("spinbutton", name="Tokens").fill("30")
    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Chunks in the prompt").wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    expected = engine.answer(QUESTION, top_k=3, max_tokens=30)
    assert page.locator("#answer").text_content() == expected.text
    assert len({len(text) for text in page.evaluate("answers")}) > 5
    assert re.search(r"blend at ratio 0.15: first token after \d+\.\d+ s; 3 chunks", page.locator("#summary").inner_text())
    items = page.locator("#chunks > li")
    assert items.count() == 3
    for item, scored in zip(items.all(), expected.chunks, strict=True):
        assert scored.chunk.title in item.get_by_role("heading").inner_text()
        told = re.search(r"KV from (RAM|NVMe); (\d+) tokens, (\d+) recomputed", item.inner_text())
        assert told, item.inner_text()
        assert int(told[2]) == len(scored.chunk.token_ids)
        assert item.locator("mark").count() == int(told[3])
    shades = {page.locator(f"mark.d{rank}").first.evaluate("one => getComputedStyle(one).backgroundColor") for rank in (0, 3)}
    assert len(shades) == 2
    assert "hit rate" in page.locator("#store").inner_text()
    assert fits(page)


def test_compare(page: Any, address: str) -> None:
    """Each method's time to first token stands in a row of its own."""
    open_page(page, address)
    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.get_by_role("button", name="Compare methods").click()
    rows = page.locator("#methods tr")
    rows.nth(3).wait_for()
    assert rows.locator("th").all_inner_texts() == ["full_recompute", "prefix_cache", "full_reuse", "blend"]
    for row in rows.all():
        assert float(row.locator("td").first.inner_text()) > 0
    page.locator("#stop:disabled").wait_for()
    assert fits(page)


def test_stop(page: Any, address: str, server: Server) -> None:
    """Stop ends the answer in the middle, in the service too."""
    open_page(page, address)
    page.get_by_role("spinbutton", name="Chunks").fill("1")
    page.get_by_role("spinbutton", name="Tokens").fill("380")
    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: server.scheduler.state.decoding == 0)
    assert b'outcome="cancelled"} 1.0' in server.metrics.text()
    assert page.get_by_role("alert").count() == 0


def test_text_is_never_markup(page: Any, address: str) -> None:
    """A document's title and text are shown as they are, whatever they hold."""
    open_page(page, address)
    page.get_by_role("spinbutton", name="Chunks").fill("2")
    page.get_by_role("textbox", name="Question").fill(MARKUP)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=MARKUP).first.wait_for()
    assert page.title() == "CacheBlend"
    assert page.locator("main img").count() == page.locator("main script").count() == 0
    assert fits(page)


def test_errors_are_told(page: Any, open_engine: OpenEngine) -> None:
    """What the service refuses stands in an alert, with its words, and the next question is answered all the same."""
    engine = open_engine()
    with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server, listening(server) as address:
        page.expected_faults = 1  # the browser's own line about a status of 400
        open_page(page, address)
        page.get_by_role("textbox", name="Question").fill(QUESTION)
        page.get_by_role("spinbutton", name="Chunks").fill("2")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert "no documents" in page.get_by_role("alert").inner_text()
        page.get_by_role("spinbutton", name="Chunks").fill("0")
        page.get_by_role("button", name="Ask").click()
        page.locator("#summary:not(:empty)").wait_for()
        assert page.get_by_role("alert").count() == 0
