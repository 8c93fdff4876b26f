"""The command line: output, exit codes, one line an error."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from engines import DOCUMENTS, POSITIONS, QUESTION

from cacheblend.base.errors import CacheBlendError
from cacheblend.retriever import DEFAULT_EMBEDDER
from cacheblend.service.cli import ask as ask_command
from cacheblend.service.cli import main as cli
from cacheblend.service.cli import options
from cacheblend.service.cli.model import bundled_corpus, choose_model

EOS = 1  # of the tiny model


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, object]:
        """The one JSON object on stdout."""
        value: dict[str, object] = json.loads(self.out)
        return value


class CommandLine:
    """Runs `cacheblend` in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, store: Path) -> None:
        self._capsys, self.model, self.store = capsys, model, store

    def __call__(self, *arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(arguments))
        captured = self._capsys.readouterr()
        return Outcome(exit_.value.code or 0, captured.out, captured.err)

    def on_store(self, command: str, *arguments: str) -> Outcome:
        options = ("--model", str(self.model), "--store-dir", str(self.store), "--chunk-tokens", "24")
        return self(command, *arguments, *options)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    from fakes import FakeEmbedder

    fake = FakeEmbedder(name=DEFAULT_EMBEDDER)
    monkeypatch.setattr("cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: fake)
    return CommandLine(capsys, model_dir, tmp_path / "store")


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    """Three documents, as a file of documents and one case."""
    path = tmp_path / "passages.jsonl"
    case = {"question": "?", "passages": [{key: document[key] for key in ("title", "text")} for document in DOCUMENTS[1:3]]}
    path.write_text(json.dumps(DOCUMENTS[0]) + "\n\n" + json.dumps(case) + "\n", encoding="utf-8")
    return path


def test_a_store_goes_to_a_remote_tier_and_back(run: CommandLine, passages: Path, tmp_path: Path) -> None:
    """`store push`, `ls` and `pull` of --remote say in JSON what they did; without a URL they say what to give."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    entries = run.on_store("ingest", str(passages), "--json").json["computed"]
    store, remote = ("--store-dir", str(run.store)), ("--remote", f"file://{tmp_path}/objects", "--json")
    report = run("store", "push", *store, *remote).json
    assert (report["entries"], report["already_there"], report["refused"]) == (entries, 0, 0)
    listed = run("store", "ls", *remote).json["entries"]
    assert isinstance(listed, list)
    assert {entry["key"] for entry in listed} == {
        entry["key"] for entry in run("store", "ls", *store, "--json").json["entries"]
    }
    run("store", "clear", *store, "--yes")
    assert run("store", "pull", *store, *remote).json["entries"] == entries
    assert run("store", "verify", *store, "--json").json["ok"] is True
    refused = run("store", "push", *store)
    assert refused.code == 2
    assert "--remote URL" in refused.err


def test_ingest_ask_and_store(run: CommandLine, passages: Path) -> None:
    """Documents are ingested, a question is answered from their stored KV, and the store is listed, checked and emptied."""
    first = run.on_store("ingest", str(passages), "--json")
    assert (first.code, first.json["documents"]) == (0, 3)
    assert first.json["computed"] == first.json["chunks"]
    assert run.on_store("ingest", str(passages), "--json").json["computed"] == 0
    answer = run.on_store("ask", QUESTION, "--top-k", "3", "--max-tokens", "4", "--recompute-ratio", "0.15", "--json").json
    assert answer["plan"]["hits"] == 3
    assert len(answer["token_ids"]) == 4
    assert "(score " in run.on_store("ask", QUESTION, "--top-k", "2", "--method", "full_recompute").out
    nothing = run.on_store("ask", QUESTION, "--max-tokens", "4", "--min-score", "1")
    assert (nothing.code, "no chunk reached --min-score" in nothing.out) == (0, True)
    assert "min_score=2" in run.on_store("ask", QUESTION, "--min-score", "2").err
    assert "the prompt is short" in run.on_store("ask", QUESTION).out
    of_answer = answer["chunks"][0]
    first_line, last_line = of_answer["lines"]
    [text] = [document["text"] for document in DOCUMENTS if document["title"] == of_answer["title"]]
    assert of_answer["text"].strip()[-20:] in "\n".join(text.split("\n")[first_line - 1 : last_line])
    shown = run("documents", "show", of_answer["document_id"], "--store-dir", str(run.store))
    assert f"tokens, lines {first_line}-{last_line}" in shown.out or f"tokens, line {first_line}\n" in shown.out
    store = ("--store-dir", str(run.store))
    entries = run("store", "ls", *store, "--json").json["entries"]
    assert len(entries) == first.json["chunks"]
    assert run("store", "stat", *store, "--json").json["tokens"] == first.json["tokens"]
    assert run("store", "verify", *store, "--json").json["ok"] is True
    assert run("store", "clear", *store, "--yes", "--json").json == {"removed": len(entries)}
    assert run("store", "ls", *store, "--json").json == {"entries": []}


def test_a_store_knows_what_it_was_made_with(run: CommandLine, passages: Path) -> None:
    """Model, chunk size and codec that are left out are the store's; a flag wins over them."""
    store = ("--store-dir", str(run.store))
    assert run.on_store("ingest", str(passages), "--kv-cache-dtype", "int8").code == 0
    answer = run("ask", QUESTION, *store, "--max-tokens", "1", "--recompute-ratio", "0.15", "--json")
    assert answer.json["plan"]["hits"] > 0
    assert "loading the model" in answer.err
    again = run("ingest", str(passages), *store, "--json").json
    assert (again["unchanged"], again["computed"]) == (3, 0)
    raw = run("ask", QUESTION, *store, "--kv-cache-dtype", "raw", "--recompute-ratio", "0.15", "--max-tokens", "1", "--json")
    assert raw.json["plan"]["hits"] == 0
    (run.store / "settings.json").write_text("[")
    assert run("ingest", str(passages), *store).code == 2, "a file that cannot be read says nothing"


def test_the_reader_has_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model and a store, the reader's corpus goes beside the user's store and not into it, nor into this folder."""
    monkeypatch.setattr(options, "DEFAULT_STORE_DIR", tmp_path / "data" / "store")
    chosen = choose_model(None, 512, options.DEFAULT_STORE_DIR)
    assert (chosen.store_dir, chosen.wants_corpus) == (tmp_path / "data" / "reader", True)
    chosen.store_dir.mkdir(parents=True)
    assert not choose_model(None, 512, options.DEFAULT_STORE_DIR).wants_corpus
    assert choose_model(None, 512, tmp_path / "named").store_dir == tmp_path / "named"


def test_an_ingest_says_what_it_takes(run: CommandLine, passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV a token and disk are told first; much is asked about, refused where nobody can be asked, and done with --yes."""
    told = run.on_store("ingest", str(passages)).err
    assert "kB a token (raw): about" in told
    assert str(run.store) in told
    monkeypatch.setattr("cacheblend.service.cli.documents.ASK_FROM_BYTES", 0)
    run.store = run.store.with_name("other")
    refused = run.on_store("ingest", str(passages))
    assert (refused.code, "give --yes" in refused.err) == (2, True)
    assert not (run.store / "kv").exists(), "nothing was begun"
    assert run.on_store("ingest", str(passages), "--yes").code == 0
    assert run.on_store("ingest", str(passages)).code == 0, "what is stored already is not asked about"


def test_a_codec_that_fits(run: CommandLine, passages: Path) -> None:
    """Where raw KV does not fit the budget, and nobody named a codec, one that fits is taken, said, and kept for later."""
    budget = ("--nvme-budget-bytes", "120000")
    assert "(int8)" in run.on_store("ingest", str(passages), *budget).err
    assert json.loads((run.store / "settings.json").read_text())["kv_cache_dtype"] == "int8"
    run.store = run.store.with_name("other")
    assert "(raw)" in run.on_store("ingest", str(passages), *budget, "--kv-cache-dtype", "raw").err


def test_shards_are_merged(run: CommandLine, passages: Path, tmp_path: Path) -> None:
    """Two machines ingest a share each into a folder of its own, and the two become one store."""
    shards = [CommandLine(run._capsys, run.model, tmp_path / f"shard-{index}") for index in (1, 2)]
    reports = [
        shard.on_store("ingest", str(passages), "--shard", f"{index}/2", "--json").json for index, shard in enumerate(shards, 1)
    ]
    assert sum(report["documents"] for report in reports) == 3
    merge = ("store", "merge", *(str(shard.store) for shard in shards), "--store-dir", str(run.store))
    merged = run(*merge, "--json").json
    assert (merged["entries"], merged["indexed"]) == (sum(report["computed"] for report in reports), 3)
    assert run(*merge).out.startswith("0 entries copied")
    whole = run.on_store("ingest", str(passages), "--json").json
    assert (whole["unchanged"], whole["computed"]) == (3, 0)
    assert run.on_store("ingest", str(passages), "--shard", "3/2").code == 2


def test_documents(run: CommandLine, passages: Path) -> None:
    """Documents are listed, shown, pinned and deleted without a model."""
    run.on_store("ingest", str(passages))
    store = ("--store-dir", str(run.store))
    first, *others = run("documents", "ls", *store, "--json").json["documents"]
    assert len(others) == 2
    assert first["stored_chunks"] > 0
    assert first["title"] in run("documents", "ls", *store).out
    assert "3 documents" in run("documents", "ls", *store).out
    shown = run("documents", "show", first["id"], *store, "--json").json
    assert len(shown["texts"]) == first["chunks"]
    assert shown["texts"][0]["text"] in run("documents", "show", first["id"], *store).out
    assert run("documents", "pin", first["id"], *store, "--json").json["pinned"] is True
    assert run("documents", "unpin", first["id"], *store).code == 0
    assert run("documents", "delete", first["id"], *store, "--yes", "--json").json["id"] == first["id"]
    run("documents", "delete", others.pop()["id"], *store, "--yes")
    assert "1 document\n" in run("documents", "ls", *store).out
    assert run("documents", "ls", *store, "--json").json["documents"] == others
    assert run("store", "verify", *store).code == 0
    unknown = run("documents", "delete", first["id"], *store, "--yes")
    assert unknown.code == 2
    assert "documents ls" in unknown.err
    assert run("documents", "ls", "--store-dir", str(run.store / "nowhere")).code == 2


def test_verify_finds_damage(run: CommandLine, passages: Path) -> None:
    """A flipped byte makes `store verify` exit with 1, and with 0 once it was repaired."""
    run.on_store("ingest", str(passages))
    file = next(path for path in (run.store / "kv" / "entries").rglob("*") if path.is_file())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store = ("--store-dir", str(run.store))
    found = run("store", "verify", *store)
    assert found.code == 1
    assert "1 damaged" in found.out
    assert run("store", "verify", *store, "--repair").code == 0
    assert run("store", "verify", *store).code == 0


def test_verify_looks_at_the_index(run: CommandLine, passages: Path) -> None:
    """A damaged document in the index makes `store verify` exit with 1; `--repair` takes it out, and ingesting mends it."""
    run.on_store("ingest", str(passages))
    store = ("--store-dir", str(run.store))
    id_ = run("documents", "ls", *store, "--json").json["documents"][0]["id"]
    with sqlite3.connect(run.store / "index" / "catalogue.sqlite") as catalog:
        catalog.execute("UPDATE chunks SET text = upper(text) WHERE document_id = ?", (id_,))
    catalog.close()
    shown = run("documents", "show", id_, *store)
    assert (shown.code, "ingest it again" in shown.err) == (1, True)
    found = run("store", "verify", *store)
    assert (found.code, f"{id_}: damaged in the index" in found.out) == (1, True)
    assert run("store", "verify", *store, "--repair", "--json").json["index"]["damaged"] == [id_]
    assert run("store", "verify", *store).code == 0
    assert run.on_store("ingest", str(passages), "--json").json["added"] == 1
    assert run("documents", "show", id_, *store).code == 0


def test_pages_of_documents(run: CommandLine, passages: Path) -> None:
    """A list of documents comes in pages, if that is asked for."""
    run.on_store("ingest", str(passages))
    store = ("--store-dir", str(run.store), "--json")
    every = [document["id"] for document in run("documents", "ls", *store).json["documents"]]
    page = run("documents", "ls", "--limit", "2", *store).json
    assert ([document["id"] for document in page["documents"]], page["has_more"]) == (every[:2], True)
    rest = run("documents", "ls", "--after", every[1], *store).json
    assert ([document["id"] for document in rest["documents"]], rest["has_more"]) == (every[2:], False)
    assert run("documents", "ls", "--after", "nothing", *store).code == 2


def test_a_file_of_pages_is_one_row(run: CommandLine, tmp_path: Path) -> None:
    """A file's pages are one row, deleted by the file's name; `--parts` lists each."""
    passages = tmp_path / "pages.jsonl"
    pages = [{"id": f"r.pdf#page={page}", "title": "", "text": f"Words of page {page}."} for page in (1, 2)]
    passages.write_text("".join(json.dumps(page) + "\n" for page in pages))
    run.on_store("ingest", str(passages))
    store = ("--store-dir", str(run.store))
    (file,) = run("documents", "ls", *store, "--json").json["documents"]
    assert (file["id"], file["parts"]) == ("r.pdf", 2)
    assert run("documents", "ls", *store).out.endswith("1 document\n")
    assert [part["id"] for part in run("documents", "ls", "--parts", *store, "--json").json["documents"]] == [
        page["id"] for page in pages
    ]
    assert "[0] page=2, " in run("documents", "show", "r.pdf", *store).out
    assert "KV of 2 chunks" in run("documents", "delete", "r.pdf", *store, "--yes").out
    assert run("documents", "ls", *store).out.endswith("0 documents\n")


def test_demo_compares_four_methods(run: CommandLine, passages: Path) -> None:
    """The demo asks by every method; prefix caching is exact, blending recomputes less than everything."""
    arguments = ("--passages", str(passages), "--question", QUESTION, "--chunk-tokens", "24", "--top-k", "4", "--repeats", "1")
    demo = run("demo", str(run.model), *arguments, "--max-tokens", "2", "--json").json
    methods = demo["methods"]
    assert set(methods) == {"full_recompute", "prefix_cache", "full_reuse", "blend"}
    assert methods["full_recompute"]["logit_difference"] == 0
    assert methods["prefix_cache"]["logit_difference"] < 1e-4
    assert methods["full_reuse"]["tokens_recomputed"] < methods["blend"]["tokens_recomputed"]
    assert methods["blend"]["tokens_recomputed"] < methods["full_recompute"]["tokens_recomputed"] == demo_tokens(methods)
    assert "prefix_cache has seen" in demo["note"]


def demo_tokens(methods: dict[str, dict[str, float]]) -> float:
    return methods["full_recompute"]["prompt_tokens"]


def test_usage_errors_exit_with_2(run: CommandLine, passages: Path, tmp_path: Path) -> None:
    """A value that is not allowed, named with its remedy in one line on stderr, exits with 2 and prints no traceback."""
    run.on_store("ingest", str(passages))
    cases = [
        (run.on_store("ask", "  "), "is empty; ask"),
        (run.on_store("ask", QUESTION, "--top-k", "0"), "top_k"),
        (run.on_store("ask", QUESTION, "--recompute-ratio", "1.5"), "0 to 1"),
        (run.on_store("ask", QUESTION, "--method", "magic"), "full_reuse"),
        (run.on_store("ask", QUESTION, "--max-tokens", "0"), "max_tokens"),
        (run.on_store("ask", QUESTION, "--dtype", "int3"), "bfloat16"),
        (run.on_store("ask", QUESTION, "--device", "abacus"), "abacus"),
        (run.on_store("ingest", str(tmp_path / "nothing.jsonl")), "does not exist"),
        (run("ask", QUESTION, "--model", str(tmp_path / "no" / "model"), "--store-dir", str(run.store)), "config.json"),
    ]
    for outcome, says in cases:
        assert outcome.code == 2, outcome.err
        assert says in outcome.err
        assert "Traceback" not in outcome.err
        assert outcome.out == ""


def test_unknown_options_exit_with_2(run: CommandLine) -> None:
    """What the command line itself does not know is a usage error too."""
    assert run("ask", "?", "--nonsense").code == 2
    assert run("nonsense").code == 2


def test_a_bad_line_is_named(run: CommandLine, tmp_path: Path) -> None:
    """A line that is not JSON, or no document, is named by file and line, and nothing is ingested."""
    broken = tmp_path / "broken.jsonl"
    for second, says in (
        ('{"text": ', "not JSON"),
        ('{"title": "no text"}', "neither a document"),
        ("[1]", "neither a document"),
    ):
        broken.write_text(json.dumps(DOCUMENTS[0]) + "\n" + second + "\n", encoding="utf-8")
        outcome = run.on_store("ingest", str(broken))
        assert outcome.code == 2
        assert "broken.jsonl, line 2" in outcome.err
        assert says in outcome.err
    assert not run.store.exists()


def test_failures_exit_with_1(run: CommandLine, passages: Path) -> None:
    """A store's folder that holds something else is a failure: exit code 1 and one line."""
    (run.store / "kv").mkdir(parents=True)
    (run.store / "kv" / "letter.txt").write_text("not a store")
    outcome = run.on_store("ingest", str(passages))
    assert outcome.code == 1
    assert "store" in outcome.err
    assert (run.store / "kv" / "letter.txt").read_text() == "not a store"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """With `--debug` the error itself is raised."""
    with pytest.raises(CacheBlendError):
        cli.main(["--debug", "store", "ls", "--store-dir", str(tmp_path / "nowhere")])


def test_no_store_is_a_usage_error(run: CommandLine, tmp_path: Path) -> None:
    """Every command that needs a store says so with exit code 2."""
    for command in (["ask", "?", "--model", str(run.model)], ["store", "ls"], ["store", "verify"], ["documents", "ls"]):
        outcome = run(*command, "--store-dir", str(tmp_path / "nowhere"))
        assert (outcome.code, outcome.out) == (2, "")
        assert "store" in outcome.err


def test_a_question_about_too_few_chunks(run: CommandLine, tmp_path: Path) -> None:
    """The default of six chunks, or any number above the corpus, takes what there is; an answer is as long as it fits."""
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({**each, "text": str(each["text"])[:220]}) + "\n" for each in DOCUMENTS[:2]))
    report = run.on_store("ingest", str(path), "--json").json
    for more in ([], ["--top-k", "999"]):
        asked = run.on_store("ask", QUESTION, "--json", *more)
        assert asked.code == 0, asked.err
        answer = asked.json
        assert len(answer["chunks"]) == min(report["chunks"], 999 if more else 6)
        is_full = answer["plan"]["prompt_tokens"] + len(answer["token_ids"]) == POSITIONS
        assert is_full or answer["token_ids"][-1] == EOS


def test_a_folder_with_bad_files(run: CommandLine, tmp_path: Path) -> None:
    """The good files are ingested and can be asked about; the bad ones are listed at the end, with exit code 1."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.txt").write_bytes("Der Müller heißt Ada und wohnt über der Brücke.".encode("cp1252"))
    (folder / "empty.txt").touch()
    (folder / "binary.md").write_bytes(bytes(range(256)))
    (folder / ".secret.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    outcome = run.on_store("ingest", str(folder))
    assert outcome.code == 1
    assert outcome.out.startswith("1 document (1 new")
    *_, head, first, second = outcome.err.splitlines()
    assert head == "2 files could not be used:"
    assert (first.strip(), second.strip()) == (
        f"{folder / 'binary.md'}: binary, or text in no known encoding; save it as UTF-8",
        f"{folder / 'empty.txt'}: empty; write something into it, or leave it out",
    )
    assert f"skipped, hidden: {folder / '.secret.txt'}" in outcome.err
    assert f"skipped, image; describe it in a text file: {folder / 'picture.png'}" in outcome.err
    again = run.on_store("ingest", str(folder), "--json")
    assert (again.code, again.json["unchanged"], len(again.json["faults"])) == (1, 1, 2)  # type: ignore[arg-type]
    assert run.on_store("ask", "Wer ist Ada?", "--json").json["chunks"][0]["document_id"] == "good.txt"  # type: ignore[index]


def test_the_model_of_a_store_is_asked_for(run: CommandLine, passages: Path) -> None:
    """Without --model, over a store of another model, the error says that the packaged reader was meant, and what to give."""
    run.on_store("ingest", str(passages))
    (run.store / "settings.json").unlink()  # as of a store that was made before there were any
    outcome = run("ask", QUESTION, "--store-dir", str(run.store))
    assert outcome.code == 2
    assert "No --model was given" in outcome.err


def test_nobody_to_ask(run: CommandLine, passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a removal says that --yes is needed, and removes nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    run.on_store("ingest", str(passages))
    id_ = str(DOCUMENTS[0]["id"])
    for command in (["documents", "delete", id_], ["store", "clear"]):
        outcome = run(*command, "--store-dir", str(run.store))
        assert outcome.code == 2
        assert "give --yes" in outcome.err
    assert run("documents", "show", id_, "--store-dir", str(run.store), "--json").json["stored_chunks"]


def test_what_the_command_line_says(run: CommandLine) -> None:
    """A key comes with the table that its hash belongs in; the version; a busy port is one line, before the model is loaded."""
    assert "put the hash in [tenants.NAME];" in run("api-key").out.replace("\n", " ")
    assert run("--version").out.startswith("cacheblend 0.")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        outcome = run("serve", "--model", str(run.model / "nowhere"), "--store-dir", str(run.store), "--port", port)
    assert outcome.code == 1
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use" in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["ingest"],
        ["ask"],
        ["demo"],
        ["store", "ls"],
        ["store", "stat"],
        ["store", "verify"],
        ["store", "clear"],
        ["store", "merge"],
        *(["documents", name] for name in ("ls", "show", "delete", "pin", "unpin")),
    ],
)
def test_help_has_an_example(run: CommandLine, command: list[str]) -> None:
    """Every command explains itself with an example."""
    outcome = run(*command, "--help")
    assert outcome.code == 0
    assert "cacheblend" in outcome.out
    assert "--json" in outcome.out


def test_text_files_and_folders(run: CommandLine, tmp_path: Path) -> None:
    """A folder's text files are documents, named by their path in it."""
    folder = tmp_path / "handbook"
    (folder / "travel").mkdir(parents=True)
    (folder / "travel" / "rules.md").write_text(str(DOCUMENTS[0]["text"]), encoding="utf-8")
    (folder / "notes.txt").write_text(str(DOCUMENTS[1]["text"]), encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG")
    assert run.on_store("ingest", str(folder), "--json").json["documents"] == 2
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    outcome = run.on_store("ingest", str(folder), "--json")
    assert (outcome.code, outcome.json["documents"]) == (0, 3)


def test_ask_without_a_model_asks_the_reader_over_its_corpus(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes the store of the bundled corpus, a second one finds it."""
    corpus = bundled_corpus()[:6]
    calls: list[int] = []
    monkeypatch.setattr("cacheblend.service.cli.model.bundled_corpus", lambda: calls.append(1) or corpus)
    for _ in range(2):
        question = f"Who knows {corpus[0]['title']}?"
        answer = run("ask", question, "--store-dir", str(run.store), "--top-k", "3", "--max-tokens", "4", "--json")
        assert answer.code == 0, answer.err
        assert len(answer.json["chunks"]) == 3
    assert len(calls) == 1


def test_an_answer_is_shown_as_it_comes(run: CommandLine, passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's text is written at once, all of it is the answer, and one that is interrupted stays where it was."""
    assert run.on_store("ingest", str(passages)).code == 0
    ask = ["ask", QUESTION, "--method", "full_recompute", "--max-tokens", "12"]
    text = run.on_store(*ask, "--json").json["text"]
    show, pieces = ask_command._show, list[str]()
    monkeypatch.setattr(ask_command, "_show", lambda piece: (pieces.append(piece), show(piece)))
    whole = run.on_store(*ask)
    assert "".join(pieces) == f"{text}\n"
    assert whole.out.startswith(f"{text}\n  - ")
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


def test_documents_that_are_parts_of_files_are_told(run: CommandLine, passages: Path) -> None:
    """Who gives a file of several documents is told why there are more documents than files; of as many, nothing."""
    assert "1 file read: 3 documents, as a page" in run.on_store("ingest", str(passages)).err
    for name in ("a.txt", "b.txt"):
        (passages.parent / "texts").mkdir(exist_ok=True)
        (passages.parent / "texts" / name).write_text(f"the text of {name}")
    assert "read:" not in run.on_store("ingest", str(passages.parent / "texts")).err


def test_an_answer_has_an_end(run: CommandLine, passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that never ends is cut, and that is told; --max-tokens goes before it."""
    assert run.on_store("ingest", str(passages)).code == 0
    monkeypatch.setattr(ask_command, "MOST_TOKENS", 5)
    cut = run.on_store("ask", QUESTION, "--json")
    assert len(cut.json["token_ids"]) == 5  # type: ignore[arg-type]
    assert "--max-tokens allows more" in cut.err
    asked = run.on_store("ask", QUESTION, "--json", "--max-tokens", "7")
    assert len(asked.json["token_ids"]) == 7  # type: ignore[arg-type]
    assert "--max-tokens" not in asked.err


def test_ask_makes_no_store(run: CommandLine) -> None:
    outcome = run.on_store("ask", "Who?")
    assert outcome.code == 2
    assert "no store at" in outcome.err
    assert not run.store.exists()


def test_watching_ends_at_sigterm(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--watch` stays, follows a file that comes later, and ends at SIGTERM with all closed and exit code 0."""
    pytest.importorskip("watchfiles", reason="needs the extra rag")
    monkeypatch.setattr("cacheblend.service.engine.folder_watch.QUIET_MS", 50)
    folder, record = tmp_path / "notes", run.store / "watched.json"
    folder.mkdir()

    def change_and_stop() -> None:
        try:
            for number in range(200):
                (folder / f"{number}.txt").write_text(f"The news of day {number} are short.")
                time.sleep(0.2)
                if number and record.exists() and '"1.txt"' in record.read_text():
                    break
        finally:
            if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:  # the command's own
                os.kill(os.getpid(), signal.SIGTERM)

    changes = threading.Thread(target=change_and_stop)
    changes.start()
    ended = run.on_store("ingest", str(folder), "--watch", "--json")
    changes.join()
    assert ended.code == 0
    assert "watching" in ended.err
    assert "stopped watching" in ended.err
    assert ended.json["added"] >= 2
    assert len(run("documents", "ls", "--store-dir", str(run.store), "--json").json["documents"]) == ended.json["added"]
    refused = run.on_store("ingest", str(folder / "0.txt"), "--watch")
    assert (refused.code, "--watch follows folders" in refused.err) == (2, True)
