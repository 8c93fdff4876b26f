"""The documents' links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
CODE = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(
    r"(?<!\S)(?:base|blend|store|loader|retriever|service|integrations|eval|scripts|tests|deploy|examples|docs)/[\w./-]*"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    """Each relative link of a page leads to a file that is there, and its anchor to a heading."""
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_files_named(page: Path) -> None:
    """Each file of the project that a page names in code, alone or in a command, is there."""
    named = [path for code in CODE.findall(page.read_text()) for path in NAMED.findall(code)]
    assert not [path for path in named if not (ROOT / path).exists()], page.name
