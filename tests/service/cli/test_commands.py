"""The command line: output, exit codes, one line an error."""

import json
import shutil
import socket
import sqlite3
from pathlib import Path

import pytest
from command_line import CommandLine
from engines import DOCUMENTS, QUESTION

from cacheblend.base.errors import CacheBlendError
from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.cli import ask as ask_command
from cacheblend.cli import main as cli
from cacheblend.service.engine.config import remembered_settings


@pytest.fixture
def store(run: CommandLine, passages: Path) -> tuple[str, str]:
    """A store of three documents, as options name it."""
    assert run.on_store("ingest", str(passages)).code == 0
    return ("--store-dir", str(run.store))


def test_ingest_ask_and_store(run: CommandLine, passages: Path) -> None:
    """Documents are ingested, a question is answered from their stored KV, and the store is checked."""
    first = run.on_store("ingest", str(passages), "--json")
    assert (first.code, first.json["documents"]) == (0, 3)
    assert first.json["computed"] == first.json["chunks"]
    assert run.on_store("ingest", str(passages), "--json").json["computed"] == 0
    answer = run.on_store("ask", QUESTION, "--num-chunks", "3", "--max-tokens", "4", "--recompute-ratio", "0.15", "--json").json
    assert answer["plan"]["hits"] == 3
    assert len(answer["token_ids"]) == 4
    short = ("ask", QUESTION, "--max-tokens", "4")
    assert "(score " in run.on_store(*short, "--num-chunks", "2", "--method", "full_recompute").out
    nothing = run.on_store(*short, "--min-score", "1")
    assert (nothing.code, "no chunk reached min_score=1" in nothing.out) == (0, True)
    assert "computed in full" in (said := run.on_store(*short)).out
    assert f"answering from 3 documents in {run.store}" in said.err
    of_answer = answer["chunks"][0]
    first_line, last_line = of_answer["lines"]
    [text] = [document["text"] for document in DOCUMENTS if document["title"] == of_answer["title"]]
    assert of_answer["text"].strip()[-20:] in "\n".join(text.split("\n")[first_line - 1 : last_line])
    shown = run("documents", "show", of_answer["document_id"], "--store-dir", str(run.store))
    assert f"tokens, lines {first_line}-{last_line}" in shown.out or f"tokens, line {first_line}\n" in shown.out
    store = ("--store-dir", str(run.store))
    verified = run("store", "verify", *store, "--json").json
    assert (verified["ok"], verified["entries"]) == (True, first.json["chunks"])


def test_metadata(run: CommandLine, passages: Path) -> None:
    """Options give all documents metadata, a question's filter picks by them, and what cannot be used is said first."""
    fields = ("--metadata", "year=2024", "--metadata", 'lang=["de", "fr"]', "--metadata", "source=the shelf")
    assert run.on_store("ingest", str(passages), *fields).code == 0
    ask = ("ask", QUESTION, "--max-tokens", "1", "--json", "--filter")
    (found, *_) = run.on_store(*ask, '{"year": {"gte": 2024}, "lang": "fr"}').json["chunks"]
    assert found["metadata"] == {"year": 2024, "lang": ["de", "fr"], "source": "the shelf"}
    assert run.on_store(*ask, '{"year": 2025}').json["chunks"] == []
    for command, words in (
        ((*ask, '{"year": {"is": 1}}'), "'is' is no operator"),
        ((*ask, "year"), "--filter: not JSON"),
        (("ingest", str(passages), "--metadata", "year"), "give NAME=VALUE"),
        (("ingest", str(passages), "--metadata", 'a={"b": 1}'), "no plain value"),
        (("ingest", str(passages), "--metadata", "a=1", "--vllm", "http://localhost:1"), "--metadata cannot be given with"),
    ):
        refused = run.on_store(*command)
        assert (refused.code, words in refused.err) == (2, True), refused.err


def test_explain(run: CommandLine, passages: Path, tmp_path: Path) -> None:
    """A request's passages are shown with their reasons, stored ones with their document; a file that is none is an error."""
    store = ("--store-dir", str(run.store))
    assert run("ingest", str(passages), "--model", str(run.model), "--chunk-tokens", "400", *store).code == 0
    text, request = str(DOCUMENTS[0]["text"]).strip(), tmp_path / "request.json"
    tool = " ".join(["It was said that it rains there."] * 5)
    system = {"role": "system", "content": [{"type": "text", "text": f"<source>{tool}</source>"}]}
    request.write_text(json.dumps({"messages": [system, {"role": "user", "content": f"Read: {text}: why?"}]}))
    found = run("explain", str(request), *store, "--json").json["passages"]
    assert [(one["message"], one["reason"], one["text"]) for one in found] == [(0, "tag", tool), (1, "stored", text)]
    assert "2 passages in 2 messages" in run("explain", str(request), *store).out
    request.write_text(json.dumps({"prompt": f"Read.\n[1] {tool}\nQuestion: why?"}), encoding="utf-8-sig")
    assert "numbered" in run("explain", str(request), "--store-dir", str(tmp_path / "none")).out
    request.write_text(json.dumps({"messages": [{"role": "assistant"}, {"role": "user", "content": tool[:99]}]}))
    assert "at least 100 characters" in run("explain", str(request), *store).err
    for body, words in (
        ("{", "is no JSON"),
        ('{"model": "x"}', 'give an object with "messages"'),
        ('{"messages": [{"role": "user", "content": ""}, {"content": "x"}]}', 'each with a "role"'),
    ):
        request.write_text(body)
        refused = run("explain", str(request), *store)
        assert (refused.code, words in refused.err) == (2, True), refused.err


def test_a_store_knows_what_it_was_made_with(run: CommandLine, passages: Path) -> None:
    """Model, chunk size, codec and budget that are left out are the store's; a flag wins over them."""
    store = ("--store-dir", str(run.store))
    assert run.on_store("ingest", str(passages), "--kv-cache-dtype", "int8", "--nvme-budget-bytes", "1GB").code == 0
    assert remembered_settings(run.store)["nvme_budget_bytes"] == 10**9
    answer = run("ask", QUESTION, *store, "--max-tokens", "1", "--recompute-ratio", "0.15", "--json")
    assert answer.json["plan"]["hits"] > 0
    assert "loading the model" in answer.err
    again = run("ingest", str(passages), *store, "--json").json
    assert (again["unchanged"], again["computed"]) == (3, 0)
    assert remembered_settings(run.store)["nvme_budget_bytes"] == 10**9
    raw = run("ask", QUESTION, *store, "--kv-cache-dtype", "raw", "--recompute-ratio", "0.15", "--max-tokens", "1", "--json")
    assert raw.json["plan"]["hits"] == 0
    (run.store / "settings.json").write_text("[")
    assert run("ingest", str(passages), *store).code == 2, "a file that cannot be read says nothing"
    (run.store / "settings.json").unlink()
    outcome = run("ask", QUESTION, *store)
    assert outcome.code == 2, "neither the store names a model, nor is the default one fetched"
    assert f"No model was given: using {DEFAULT_MODEL}" in outcome.err
    assert f"cacheblend model get {DEFAULT_MODEL}" in outcome.err


def test_a_file_of_pages_is_one_row(run: CommandLine, tmp_path: Path) -> None:
    """A file's pages are one row, deleted by the file's name; `--parts` lists each."""
    passages, store = tmp_path / "pages.jsonl", ("--store-dir", str(run.store))
    pages = [{"id": f"r.pdf#page={page}", "title": "", "text": f"Words of page {page}."} for page in (1, 2)]
    passages.write_text("".join(json.dumps(page) + "\n" for page in pages))
    run.on_store("ingest", str(passages))
    head, row, count = run("documents", "ls", *store).out.splitlines()
    assert (head.split("  ")[0], row.split()[:3], count) == ("id", ["r.pdf", "2", "2"], "1 document")
    assert row.split()[-1] == "r.pdf", "a title for each"
    parts = run("documents", "ls", "--parts", *store, "--json").json["documents"]
    assert [part["id"] for part in parts] == [page["id"] for page in pages]
    assert "[0] page=2, " in run("documents", "show", "r.pdf", *store).out
    assert "KV of 2 chunks" in run("documents", "delete", "r.pdf", *store, "--yes").out


def test_documents(run: CommandLine, store: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are listed, shown and deleted without a model."""
    monkeypatch.setenv("HOME", str(run.store.parent))
    first, *others = run("documents", "ls", *store, "--json").json["documents"]
    assert len(others) == 2
    assert first["stored_chunks"] > 0
    assert first["title"] in run("documents", "ls", *store).out
    assert "3 documents" in run("documents", "ls", f"--store-dir=~/{run.store.name}").out
    shown = run("documents", "show", first["id"], *store, "--json").json
    assert len(shown["texts"]) == first["chunks"]
    assert shown["texts"][0]["text"] in run("documents", "show", first["id"], *store).out
    assert run("documents", "delete", first["id"], *store, "--yes", "--json").json["id"] == first["id"]
    run("documents", "delete", others.pop()["id"], *store, "--yes")
    assert "1 document\n" in run("documents", "ls", *store).out
    assert run("documents", "ls", *store, "--json").json["documents"] == others
    assert run("store", "verify", *store).code == 0
    unknown = run("documents", "delete", first["id"], *store, "--yes")
    assert (unknown.code, "documents ls" in unknown.err) == (2, True)


def test_a_deletion_reaches_the_remote_tier(run: CommandLine, passages: Path, tmp_path: Path) -> None:
    """What an ingest sent to a remote tier goes from there with the document."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    store, remote = ("--store-dir", str(run.store)), ("--remote", f"file://{tmp_path}/objects", "--json")
    entries = run.on_store("ingest", str(passages), *remote).json["computed"]
    gone = run("documents", "ls", *store, "--json").json["documents"][0]["id"]
    assert run("documents", "delete", gone, *store, *remote, "--yes").json["id"] == gone
    objects = sum(path.is_file() for path in (tmp_path / "objects").rglob("*"))
    assert 0 < objects == run("store", "verify", *store, "--json").json["entries"] < entries


def test_verify_finds_damage(run: CommandLine, passages: Path, store: tuple[str, str]) -> None:
    """A flipped byte and a damaged document make `store verify` exit with 1, and with 0 once they were repaired."""
    file = next(path for path in (run.store / "kv" / "entries").rglob("*") if path.is_file())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = run("store", "verify", *store)
    assert (found.code, "1 damaged" in found.out) == (1, True)
    assert run("store", "verify", *store, "--repair").code == 0
    id_ = run("documents", "ls", *store, "--json").json["documents"][0]["id"]
    with sqlite3.connect(run.store / "index" / "catalogue.sqlite") as catalog:
        catalog.execute("UPDATE chunks SET text = upper(text) WHERE document_id = ?", (id_,))
    catalog.close()
    shown = run("documents", "show", id_, *store)
    assert (shown.code, "ingest it again" in shown.err) == (1, True)
    found = run("store", "verify", *store)
    assert (found.code, f"{id_}: damaged in the index" in found.out) == (1, True)
    shutil.copytree(run.store / "index", run.store / "vllm")
    repaired = run("store", "verify", *store, "--repair", "--json").json
    assert repaired["index"]["damaged"] == repaired["vllm"]["damaged"] == [id_]
    assert run("store", "verify", *store).code == 0
    assert run.on_store("ingest", str(passages), "--json").json["added"] == 1
    assert run("documents", "show", id_, *store).code == 0


def test_usage_errors_exit_with_2(run: CommandLine, store: tuple[str, str], tmp_path: Path) -> None:
    """A value that is not allowed, named with its remedy in one line on stderr, exits with 2 and prints no traceback."""
    nowhere, id_ = ("--store-dir", str(tmp_path / "nowhere")), str(DOCUMENTS[0]["id"])
    cases = [
        (run("ask", "  ", "--model", str(tmp_path / "no" / "model"), *store), "is empty; ask"),
        (run.on_store("ask", QUESTION, "--num-chunks", "0"), "--num-chunks"),
        (run.on_store("ask", QUESTION, "--recompute-ratio", "1.5"), "0 to 1"),
        (run.on_store("ask", QUESTION, "--method", "magic"), "full_reuse"),
        (run.on_store("ask", QUESTION, "--max-tokens", "0"), "max_tokens"),
        (run.on_store("ask", QUESTION, "--min-score", "2"), "min_score=2"),
        (run.on_store("ask", QUESTION, "--dtype", "int3"), "bfloat16"),
        (run.on_store("ask", QUESTION, "--device", "abacus"), "abacus"),
        (run.on_store("ingest", str(tmp_path / "nothing.jsonl")), "does not exist"),
        (run("documents", "delete", id_, *store), "There is no terminal to ask on; give --yes"),
        (run("ask", QUESTION, "--model", str(tmp_path / "no" / "model"), *store), "no model at"),
        (run("ask", "?", "--nonsense"), "--nonsense"),
        (run("nonsense"), "nonsense"),
        (run("ask", "?", "--model", str(run.model), *nowhere), "cacheblend ingest"),
        *((run(*command, *nowhere), "--store-dir") for command in (("store", "verify"), ("documents", "ls"))),
    ]
    for outcome, says in cases:
        assert outcome.code == 2, outcome.err
        assert says in outcome.err
        assert "Traceback" not in outcome.err
        assert outcome.out == ""
    assert not (tmp_path / "nowhere").exists()
    assert run("documents", "show", id_, *store, "--json").json["stored_chunks"]
    with pytest.raises(CacheBlendError):  # with --debug the error itself is raised
        cli.main(["--debug", "store", "verify", *nowhere])


def test_keys_version_and_port(run: CommandLine) -> None:
    """A key comes with the table that its hash belongs in; the version; a busy port is one line, before the model is loaded."""
    assert "put the hash in [tenants.NAME];" in run("api-key").out.replace("\n", " ")
    assert run("--version").out.startswith("cacheblend 0.")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        outcome = run("serve", "--model", str(run.model), "--store-dir", str(run.store), "--port", port)
    assert outcome.code == 1
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use" in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.usefixtures("store")
def test_an_answer_is_shown_as_it_comes(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's text is written at once, all of it is the answer, and one that is interrupted stays where it was."""
    ask = ["ask", QUESTION, "--method", "full_recompute", "--max-tokens", "12"]
    text = run.on_store(*ask, "--json").json["text"]
    show, pieces = ask_command._show, list[str]()
    monkeypatch.setattr(ask_command, "_show", lambda piece: (pieces.append(piece), show(piece)))
    complete = run.on_store(*ask)
    assert "".join(pieces) == f"{text}\n"
    assert complete.out.startswith(f"{text}\n  - ")
    assert len(pieces) > 3

    def interrupted(piece: str) -> None:
        show(piece)
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    first = "".join(pieces[:3])
    pieces.clear()
    monkeypatch.setattr(ask_command, "_show", interrupted)
    outcome = run.on_store(*ask)
    assert outcome.code not in (0, None)
    assert outcome.out.strip() == first.strip()


@pytest.mark.usefixtures("store")
def test_an_answer_has_an_end(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that never ends is cut, and that is said; --max-tokens goes before it."""
    monkeypatch.setattr(ask_command, "MAX_TOKENS", 5)
    cut = run.on_store("ask", QUESTION, "--json")
    assert len(cut.json["token_ids"]) == 5  # type: ignore[arg-type]
    assert "--max-tokens allows more" in cut.err
    asked = run.on_store("ask", QUESTION, "--json", "--max-tokens", "7")
    assert len(asked.json["token_ids"]) == 7  # type: ignore[arg-type]
    assert "--max-tokens" not in asked.err
