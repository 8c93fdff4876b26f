"""The page in a real browser: what is there to run it, and what tests do on it."""

import shutil
from typing import Any

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: apt-get install chromium")
WIDE, PHONE = (1280, 900), (360, 740)
# Every state of the answer that the page shows.
WATCH_ANSWER = """
window.answers = [];
document.addEventListener("DOMContentLoaded", () => {
  const answer = document.getElementById("answer");
  new MutationObserver(() => answers.push(answer.textContent)).observe(answer, {childList: true});
});
"""
ONCE = pytest.mark.parametrize("page", [WIDE], indirect=True, ids=["wide"])


def open_page(page: Any, address: str) -> None:
    page.goto(address)
    page.locator("#method option[value=blend]").wait_for(state="attached")
    assert page.locator("#max_tokens").input_value() == "512"
    page.locator("#max_tokens").evaluate("one => one.value = ''")  # as many as fit: the tiny model has no room for 512
    page.locator("#documents li, #no_documents:not([hidden])").first.wait_for()


def ask(page: Any, question: str, chunks: int, tokens: int | None = None) -> None:
    """Fill in the form; the number of tokens by what the service takes where it is None."""
    page.locator("#options").evaluate("one => one.open = true")
    page.get_by_role("spinbutton", name="Chunks").fill(str(chunks))
    if tokens is not None:
        page.get_by_role("spinbutton", name="Tokens").fill(str(tokens))
    page.get_by_role("textbox", name="Question").fill(question)


def fits(page: Any) -> bool:
    """Whether nothing stands out of the window to the right."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    return bool(wide <= window)
