"""Pictures of the web page for the docs: a question asked and raced in real Chromium, wide, dark and as on a phone.

    cacheblend demo --store-dir store
    cacheblend serve --store-dir store &
    python scripts/picture_page.py http://127.0.0.1:8000 "What was the company's first product?"

They are docs/figures/page-*.jpg. The server must have documents, and the question be one that the model answers right. Needs
Playwright and Chromium on PATH.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
VIEWS = {"wide": (1280, 800, "light"), "dark": (1280, 800, "dark"), "phone": (360, 740, "light")}
TIMEOUT_MS = 200_000
LIT_MS = 1500  # until the recomputed tokens have lit up


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("question")
    parser.add_argument("--tokens", type=int, default=24, help="of the answer (default: %(default)s)")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    FIGURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme) in VIEWS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(options.address)
            page.locator("#documents li").first.wait_for()
            page.locator("#max_tokens").evaluate(f"one => one.value = {options.tokens}")
            page.get_by_role("textbox", name="Question").fill(options.question)
            page.get_by_role("button", name="Race the methods").click()
            page.locator("#lanes li").nth(3).wait_for()
            page.locator("#raced[aria-busy=false]").wait_for()
            if name == "wide":
                page.locator("#raced").screenshot(
                    path=FIGURES / "page-race.jpg", type="jpeg", quality=80, animations="disabled"
                )
            page.get_by_role("button", name="Ask", exact=True).click()
            page.locator("#chunks > li").first.wait_for()
            page.locator("#answer[aria-busy=false]").wait_for()
            page.wait_for_timeout(LIT_MS)
            if name != "phone":  # where the page scrolls to the answer
                page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=FIGURES / f"page-{name}.jpg", type="jpeg", quality=80)
        browser.close()


if __name__ == "__main__":
    main()
