"""What the docs show of the command line and of Python: each line parses, and the engine's blocks run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from engines import QUESTION, OpenEngine
from fakes import FakeEmbedder
from typer.main import get_command

from cacheblend.cli import main as cli
from cacheblend.retriever.config import DEFAULT_EMBEDDER

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?m)^```(\w+)\n(.*?)^```$", re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:(?:sudo .* )?\S+/bin/)?cacheblend ([a-z][^|&]*)")


def blocks(page: Path, *kinds: str) -> list[str]:
    """The texts of a page's blocks of some languages."""
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def command_lines(page: Path) -> list[list[str]]:
    """The arguments of every `cacheblend ...` line that a page shows."""
    lines = []
    for text in blocks(page, "sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line):
                lines.append(shlex.split(found[1], comments=True))
    return lines


LINES = [pytest.param(line, id=f"{page.name}: {' '.join(line)}") for page in PAGES for line in command_lines(page)]


@pytest.mark.parametrize("line", LINES)
def test_lines_parse(line: list[str]) -> None:
    """Each command that the docs show is there, with the options that they give it, whose values are of the right kind."""
    command, context, rest = get_command(cli.app), None, line
    while hasattr(command, "commands") or context is None:
        context = command.make_context(rest[0] if context else "cacheblend", rest, parent=context)
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found.load() if hasattr(found, "load") else found
        if not hasattr(command, "commands"):
            command.make_context(name, list(rest), parent=context)
            return


def test_the_engine_of_readme(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's program runs as it stands, in a folder that holds its model."""
    (program,) = [text for text in blocks(ROOT / "README.md", "python") if "Engine(" in text]
    (tmp_path / "smollm2-135m").symlink_to(model_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: FakeEmbedder(name=DEFAULT_EMBEDDER)
    )
    exec(compile(program, "README.md", "exec"), {})
    assert re.search(r"\d\.\d+ \d", capsys.readouterr().out)


def test_the_chain_of_the_docs(open_engine: OpenEngine) -> None:
    """The LangChain chain of docs/service.md answers a question over the chunks that its retriever found."""
    pytest.importorskip("langchain_core", reason="langchain-core is not installed: pip install 'cacheblend[langchain]'")
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough

    from cacheblend.integrations.langchain import CacheBlendRetriever, ChatCacheBlend

    (program,) = [text for text in blocks(ROOT / "docs" / "service.md", "python") if "RunnablePassthrough" in text]
    engine = open_engine()
    engine.ingest([{"id": str(number), "text": f"Fact {number}: the sky is blue on day {number}."} for number in range(4)])
    names = {
        "engine": engine,
        "CacheBlendRetriever": CacheBlendRetriever,
        "ChatCacheBlend": ChatCacheBlend,
        "ChatPromptTemplate": ChatPromptTemplate,
        "RunnablePassthrough": RunnablePassthrough,
    }
    exec(compile(program, "service.md", "exec"), names)
    reply = names["chain"].invoke(QUESTION)  # type: ignore[attr-defined]  # the program made it
    assert reply.usage_metadata["input_token_details"]["cache_read"] > 0, "no chunk was found in the prompt"
