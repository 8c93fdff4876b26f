"""What pages and examples show: command lines parse, `curl` and clients run against a service, programs run."""

import builtins
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import MODEL, listening
from engines import QUESTION, OpenEngine
from fakes import FakeEmbedder
from script_modules import load_script

from cacheblend.retriever.config import DEFAULT_EMBEDDER
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_VLLM = ROOT / "docs" / "vllm.md"  # its server is vLLM's; tests/integrations/vllm/test_router.py has its command
BLOCK = re.compile(r"(?m)^```(\w+)\n(.*?)^```$", re.DOTALL)
ADDRESS = re.compile(r"(https?://)?(localhost|127\.0\.0\.1):8000")
NAMED = "smollm2-135m"
KEY = "cb-a-key-of-the-docs"
# Strings under these keys are as they are shown, unless they are shown in part.
VERBATIM = {"object", "type", "role", "id", "filename", "purpose", "title", "status"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def shell_blocks(page: Path) -> list[str]:
    """The blocks of a page that a shell runs."""
    return [text for kind, text in blocks(page) if kind in ("sh", "bash")]


def curl_commands(text: str) -> list[str]:
    """The `curl` commands of a block, each of perhaps several lines."""
    commands, command = [], ""
    for line in text.splitlines(keepends=True):
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:  # a quote is open
            continue
        if not command.rstrip("\n").endswith("\\"):
            commands.append(command.strip())
            command = ""
    return [command for command in commands if command.startswith("curl ")]


COMMANDS = {page: [command for text in shell_blocks(page) for command in curl_commands(text)] for page in PAGES}
PYTHON = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    if page != OF_VLLM
    for number, (kind, text) in enumerate(blocks(page))
    if kind == "python" and re.search(r"openai|OpenAI", text)
]


class Service:
    """A service under the name of the docs' model, and how its address is put into what the docs show."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self._folder = address, folder

    def here(self, text: str) -> str:
        """What the docs show, for this service."""
        return ADDRESS.sub(lambda found: self.address if found[1] else self.address.removeprefix("http://"), text)

    def curl(self, command: str) -> str:
        """What a command prints; asserts a status of 2xx."""
        with_status = self.here(command.replace("curl ", "curl -sS --max-time 60 -w '\\n%{http_code}' ", 1))
        env = {**os.environ, "CACHEBLEND_API_KEY": KEY, "no_proxy": "*"}
        ran = subprocess.run(
            ["bash", "-c", with_status], cwd=self._folder, env=env, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, (command, ran.stderr)
        answer, _, status = ran.stdout.rpartition("\n")
        assert status.startswith("2"), (command, status, answer)
        return answer


@pytest.fixture
def service(open_engine: OpenEngine, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    engine = open_engine()
    folder = tmp_path / "where the commands run"
    folder.mkdir()
    (folder / "travel.md").write_text("# Travel\n\nTrains are booked by the office. A night away is paid.\n")
    http = HttpConfig(served_model_name=NAMED, api_key=getattr(request, "param", None))
    with Server(engine.config, http=http, engine=engine) as server, listening(server) as address:
        yield Service(address, folder)


def holds(shown: Any, given: Any, where: str = "answer") -> None:
    """Assert that an answer has all that is shown of it: keys, kinds of values, and the strings that are always the same."""
    if isinstance(shown, dict):
        assert isinstance(given, dict), where
        for key, value in shown.items():
            assert key in given, f"{where} has no {key}: {given}"
            if key in VERBATIM and "..." not in value:
                assert given[key] == value, f"{where}.{key}"
            holds(value, given[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert isinstance(given, list), where
        assert len(given) >= len(shown), f"{where}: {given}"
        for number, (one, other) in enumerate(zip(shown, given, strict=False)):
            holds(one, other, f"{where}[{number}]")
    elif isinstance(shown, float):
        assert isinstance(given, int | float), f"{where}: {given!r}"
    elif shown is not None:
        assert type(given) is type(shown), f"{where}: {given!r}"


def events(answer: str) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page] and page != OF_VLLM], ids=lambda page: page.name)
def test_curl(service: Service, page: Path) -> None:
    """Each command of a page, in its order, is answered with 2xx, and as the block after it shows."""
    last, ran = "", 0
    for kind, text in blocks(page):
        if kind in ("sh", "bash"):
            last = ""
            for command in curl_commands(text):
                if "Authorization" in command or ("json_schema" in command and find_spec("llguidance") is None):
                    continue
                last, ran = service.curl(command), ran + 1
                assert '"stream": true' not in command or events(last)[-1] == "[DONE]"
        elif kind == "json" and last:
            holds(json.loads(text), json.loads(last), page.name)
        elif kind == "text" and last:
            *shown, end = events(text)
            *given, given_end = events(last)
            assert given_end == end == "[DONE]"
            holds(json.loads(shown[0]), json.loads(given[0]), f"{page.name}, the first event")
            holds(json.loads(shown[-1]), json.loads(given[-1]), f"{page.name}, the last event")
    assert ran


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("service", [KEY], indirect=True)
def test_curl_with_a_key(service: Service) -> None:
    """A command with the key is let in where the service asks for one."""
    with_key = [command for commands in COMMANDS.values() for command in commands if "Authorization" in command]
    assert with_key
    for command in with_key:
        service.curl(command)
        with pytest.raises(AssertionError, match="401"):
            service.curl(command.replace("$CACHEBLEND_API_KEY", "another"))


@pytest.mark.parametrize("snippet", PYTHON)
def test_python(service: Service, snippet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each snippet of a client runs as it stands."""
    for package in re.findall(r"(?m)^(?:import|from) (\w+(?:\.llms\.\w+)?)", snippet):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[dev]'")
    openai = pytest.importorskip("openai")
    documents = [{"id": "ada", "text": "Ada Lovelace wrote the first program."}, {"text": "Lunch is at noon."}]
    httpx.post(f"{service.address}/v1/documents?wait=true", json={"documents": documents}, timeout=60).raise_for_status()
    made: list[Any] = []

    def closed_afterwards(init: Any) -> Any:
        def opened(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            made.append(self)

        return opened

    monkeypatch.setattr(openai.OpenAI, "__init__", closed_afterwards(openai.OpenAI.__init__))
    names: dict[str, Any] = {"openai": openai, "__builtins__": builtins}
    try:
        exec(compile(service.here(snippet).replace("qwen2.5-coder-0.5b", NAMED), "<docs>", "exec"), names)
    finally:
        for client in made:
            client.close()
    printed = capsys.readouterr().out
    assert made
    assert "print(" not in snippet or printed.strip()


def test_the_engine_of_readme(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's program runs as it stands, in a folder that holds its model."""
    (program,) = [text for kind, text in blocks(ROOT / "README.md") if kind == "python" and "Engine(" in text]
    (tmp_path / "qwen2.5-coder-0.5b").symlink_to(model_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: FakeEmbedder(name=DEFAULT_EMBEDDER)
    )
    exec(compile(program, "README.md", "exec"), {})
    assert re.search(r"\d\.\d+ \d", capsys.readouterr().out)


def test_the_chain_of_the_docs(open_engine: OpenEngine) -> None:
    """The LangChain chain of docs/service.md answers a question over the chunks that its retriever found."""
    pytest.importorskip("langchain_core", reason="langchain-core is not installed: pip install '.[langchain]'")
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough

    from cacheblend.integrations import langchain

    (program,) = [
        text for kind, text in blocks(ROOT / "docs" / "service.md") if kind == "python" and "RunnablePassthrough" in text
    ]
    engine = open_engine(chunk_tokens=256)
    facts = "Fact {0}: the sky is blue on day {0}, and the sea is green on day {0}, and the sand is brown for all of day {0}."
    engine.ingest([{"id": str(number), "text": facts.format(number)} for number in range(4)])
    names: dict[str, Any] = {**vars(langchain), "engine": engine, "ChatPromptTemplate": ChatPromptTemplate}
    names["RunnablePassthrough"] = RunnablePassthrough
    exec(compile(program, "service.md", "exec"), names)
    reply = names["chain"].invoke(QUESTION)
    assert reply.usage_metadata["input_token_details"]["cache_read"] > 0, "no chunk was found in the prompt"


def test_the_plain_function(open_engine: OpenEngine) -> None:
    """The second answer reuses what the first one missed."""
    first, second = load_script("plain_function", ROOT / "examples").run(open_engine())
    assert (first.plan.hits, first.plan.misses, second.plan.misses) == (0, second.plan.hits, 0) != (0, 0, 0)


def test_the_chain_of_the_examples(open_engine: OpenEngine) -> None:
    """The chain's answer is the text of `Engine.answer`, from stored KV."""
    engine = open_engine()
    pytest.importorskip("langchain_core", reason="langchain-core is not installed: pip install '.[langchain]'")
    message = load_script("langchain_chain", ROOT / "examples").run(engine, "Who signs off journeys?")
    assert message.content == engine.answer("Who signs off journeys?", num_chunks=2).text
    assert message.response_metadata["plan"]["hits"] == 2


def test_the_openai_client(open_engine: OpenEngine) -> None:
    """The client uploads documents and reads the stream."""
    openai, engine = pytest.importorskip("openai"), open_engine()
    with (
        Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server,
        listening(server) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        assert load_script("openai_client", ROOT / "examples").run(client)
    assert {document.id for document in engine.documents.page()[0]} == {"travel", "leave"}
