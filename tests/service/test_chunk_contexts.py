"""What chunks' KV is computed after: filler passages from where they should come, and a document's own earlier text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import CHUNK_TOKENS, DOCUMENTS, TOP_K, OpenEngine, ask, head_of, key_of, kinds, make_model
from fakes import tiny_tokenizer
from prompts import assert_same_kv

from cacheblend.blend import ChunkContext, Fusor
from cacheblend.retriever import Chunk, Document, PlainTokenizer
from cacheblend.service import Engine
from cacheblend.service.chunk_contexts import FILLER_FILE, FILLER_TOKENS, PACKAGED_FILLER, ChunkContexts, chunk_context
from cacheblend.service.namespace import namespace_of
from cacheblend.service.prompt import PromptPieces
from cacheblend.store import ChunkKey, context_digest
from cacheblend.store.errors import ConfigError

FIRST, *OTHERS = DOCUMENTS
PASSAGES = ["one passage of the filler, of no importance", "and another one, which is as short as that", "a third passage"]
LONG = {"id": "long", "text": " ".join(f"clause {number} of the loop." for number in range(24))}


def model_of(positions: int | None, folder: Path | str = "") -> Any:
    """What `chunk_context` reads of a fusor."""
    return SimpleNamespace(max_positions=positions, tokenizer=tiny_tokenizer(), model=SimpleNamespace(name_or_path=str(folder)))


def ids_of(*passages: str) -> tuple[int, ...]:
    plain = PlainTokenizer(tiny_tokenizer())
    return tuple(token for passage in passages for token in plain.ids(f"{passage}\n\n"))


@pytest.fixture
def filler(tmp_path: Path) -> Path:
    path = tmp_path / "filler.txt"
    path.write_text("\n\n".join(PASSAGES) + "\n")
    return path


def stored(engine: Engine) -> set[ChunkKey]:
    return {entry.key for entry in engine.store.ls()}


class TestFiller:
    """Passages that stand after the head, the same for every chunk."""

    def test_none(self) -> None:
        """Without filler chunks stand after the head and their document's text alone."""
        context = chunk_context(model_of(4096), "none", 100)
        assert (context.filler_ids, context.document_tokens) == ((), 100)

    def test_a_file(self, filler: Path) -> None:
        """A file's passages are read in order, each as a chunk is that stands in a prompt."""
        assert chunk_context(model_of(4096), str(filler), 0).filler_ids == ids_of(*PASSAGES)
        assert chunk_context(model_of(None), str(filler), 10**6).document_tokens == 10**6

    @pytest.mark.parametrize("taken", [0, 1, 2, 3])
    def test_whole_passages_within_an_eighth_of_the_positions(self, filler: Path, taken: int) -> None:
        """Passages are taken while all of them fit an eighth of the model's positions, and none is cut; windows get a half."""
        room = len(ids_of(*PASSAGES[: taken + 1])) - 1 if taken < 3 else len(ids_of(*PASSAGES))
        context = chunk_context(model_of(8 * room + 7), str(filler), 10**6)
        assert context.filler_ids == ids_of(*PASSAGES[:taken])
        assert context.document_tokens == (8 * room + 7) // 2

    def test_the_packages_own(self) -> None:
        """By default the package's passages are taken, up to 384 tokens, by a model from nowhere too, whatever lies about."""
        filler_ids = chunk_context(model_of(10**6), "auto", 0).filler_ids
        assert 0 < len(filler_ids) <= FILLER_TOKENS
        assert PACKAGED_FILLER.read_text().startswith(tiny_tokenizer().decode(filler_ids).rstrip())

    def test_nothing_of_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model that was loaded from nowhere has no folder: a context.txt where the process runs is not its own."""
        (tmp_path / FILLER_FILE).write_text("not the model's")
        monkeypatch.chdir(tmp_path)
        assert chunk_context(model_of(10**6), "auto", 0) == chunk_context(model_of(10**6, "/nowhere"), "auto", 0)

    def test_a_models_own_wins(self, tmp_path: Path, filler: Path) -> None:
        """A context.txt beside the model is its filler, unless a file is named."""
        (tmp_path / FILLER_FILE).write_text("of the model's kind")
        assert chunk_context(model_of(4096, tmp_path), "auto", 0).filler_ids == ids_of("of the model's kind")
        assert chunk_context(model_of(4096, tmp_path), str(filler), 0).filler_ids == ids_of(*PASSAGES)
        assert chunk_context(model_of(4096, tmp_path), "none", 0).filler_ids == ()

    @pytest.mark.parametrize("content", [None, b"", b" \n\n ", b"\xff\xfe\xfa"])
    def test_a_file_that_cannot_be_used(self, tmp_path: Path, content: bytes | None) -> None:
        """A file that is missing, empty or no text is refused by the option's name."""
        path = tmp_path / "bad.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"context_filler='.*bad\.txt'"):
            chunk_context(model_of(4096), str(path), 0)

    def test_an_engine_closes_what_it_opened(self, open_engine: OpenEngine, tmp_path: Path) -> None:
        """An engine refuses such a file before it makes anything."""
        with pytest.raises(ConfigError, match="context_filler"):
            open_engine(context_filler=str(tmp_path / "missing.txt"))
        assert not (tmp_path / "store").exists()

    def test_what_is_stored_stands_after_it(self, open_engine: OpenEngine, filler: Path, tmp_path: Path) -> None:
        """A chunk's stored KV is the model's own after head, filler and its document's earlier text."""
        make_model(tmp_path / "model", positions=2048)
        engine = open_engine(fusor=Fusor.from_pretrained(str(tmp_path / "model")), context_filler=str(filler))
        engine.ingest(DOCUMENTS[:2])
        for document in DOCUMENTS[:2]:
            chunks = [chunk.token_ids for chunk in engine.retriever.chunks(str(document["id"]))]
            for place, chunk in enumerate(chunks):
                kv = engine.store.get(engine._prefiller.key(chunk, chunks[:place]))
                assert kv is not None
                assert (kv.prefix_ids, kv.context) == (head_of(engine), context_digest(ids_of(*PASSAGES), chunks[:place]))
                between = [*ids_of(*PASSAGES), *(token for one in chunks[:place] for token in one)]
                own = engine.fusor.precompute(chunk, [*head_of(engine), *between])
                assert_same_kv(kv, replace(own, prefix_ids=kv.prefix_ids))
        answer = ask(engine)
        assert (answer.plan.hits, answer.plan.misses) == (TOP_K, 0)


class TestOtherSettings:
    """Stores and requests with another head or filler than what is stored was computed after."""

    @pytest.mark.parametrize("setting", ["instruction", "context_filler"])
    def test_a_store_of_another_setting_opens(self, open_engine: OpenEngine, tmp_path: Path, setting: str) -> None:
        """Its entries are misses, are filled anew beside, and are found again with the setting that they were made with."""
        make_model(tmp_path / "model", positions=2048)
        fusor = Fusor.from_pretrained(str(tmp_path / "model"))
        (tmp_path / "other.txt").write_text(PASSAGES[0])
        other = {setting: str(tmp_path / "other.txt") if setting == "context_filler" else "Other words.\n"}
        with open_engine(fusor=fusor) as engine:
            engine.ingest(DOCUMENTS)
            old = stored(engine)
        with open_engine(fusor=fusor, **other) as engine:
            assert engine.store.verify().ok
            assert stored(engine) == old
            cold = ask(engine).plan
            assert (cold.hits, cold.misses) == (0, TOP_K)
            engine.drain()
            assert ask(engine).plan.hits == TOP_K
            report = engine.ingest(DOCUMENTS)
            assert (report.unchanged, report.already_stored) == (len(DOCUMENTS), TOP_K)
            assert old < stored(engine)
            assert len(stored(engine)) == 2 * len(old)
        with open_engine(fusor=fusor) as engine:
            assert ask(engine).plan.hits == TOP_K
            assert engine.ingest(DOCUMENTS).computed == 0

    def test_a_requests_own_system_message(self, engine: Engine) -> None:
        """A prompt with another head reuses the chunks that were ingested under the server's, and at ratio 1 is exact."""

        class Layout:
            def pieces(self, chunks: list[Chunk]) -> PromptPieces:
                plain = PlainTokenizer(engine.fusor.tokenizer)
                head, tail = plain.ids("You are a pirate. Answer as one.\n"), plain.ids("What is a loop?")
                return PromptPieces((0, *head), tuple(chunk.token_ids for chunk in chunks), tuple(tail))

        before = stored(engine)
        answer = ask(engine, layout=Layout())
        assert kinds(answer) == ["fresh", *["reused"] * TOP_K, "fresh"]
        assert [segment.key for segment in answer.plan.segments[1:-1]] == [
            str(key_of(engine, scored.chunk)) for scored in answer.chunks
        ]
        engine.drain()
        assert stored(engine) == before
        exact, full = (ask(engine, method, layout=Layout(), recompute_ratio=1.0) for method in ("blend", "full_recompute"))
        assert float((exact.first_logits - full.first_logits).abs().max()) <= 1e-4


class TestChangedDocuments:
    """A chunk's KV has its document's earlier text in it: what changes there reaches it, and nothing else does."""

    def test_a_change_reaches_what_stands_after_it(self, open_engine: OpenEngine) -> None:
        """Of a replaced document the chunks from the change on are computed; those before it, and of others, are not."""
        engine = open_engine()
        engine.ingest([*DOCUMENTS, LONG])
        old = {chunk.position: key_of(engine, chunk) for chunk in engine.retriever.chunks("long")}
        others = stored(engine) - set(old.values())
        text = str(LONG["text"])
        middle = text.index("clause 12")
        report = engine.ingest([{**LONG, "text": text[:middle] + "zebra " + text[middle:]}])
        chunks = engine.retriever.chunks("long")
        new = {chunk.position: key_of(engine, chunk) for chunk in chunks}
        kept = set(old.values()) & set(new.values())
        changed = next(chunk.position for chunk in chunks if "zebra" in chunk.text)
        assert kept == {old[place] for place in range(changed)} != set()
        assert report.computed == len(chunks) - changed > 1
        assert report.dropped == len(old) - changed
        assert stored(engine) == others | set(new.values())

    def test_the_same_end_after_another_beginning(self, open_engine: OpenEngine) -> None:
        """Chunks whose own text is as before are computed again where the text before them in their window changed."""
        window = 3 * CHUNK_TOKENS
        engine = open_engine(context_document_tokens=window)
        engine.ingest([LONG])
        before = [chunk.token_ids for chunk in engine.retriever.chunks("long")]
        report = engine.ingest([{**LONG, "text": str(LONG["text"]).replace("clause 0 of", "clause 9 of")}])
        after = [chunk.token_ids for chunk in engine.retriever.chunks("long")]
        assert after[1:] == before[1:]
        reached = sum(after[0] in earlier for earlier in ChunkContext(document_tokens=window).earlier(after))
        assert report.computed == report.dropped == 1 + reached
        assert 1 < report.computed < len(after)

    @pytest.mark.parametrize("change", ["replaced", "deleted"])
    def test_nothing_of_the_old_text_is_left(self, open_engine: OpenEngine, change: str) -> None:
        """No entry stays that was computed from the old text, but for that of another document with the very same one."""
        engine = open_engine()
        engine.ingest([LONG, {**LONG, "id": "twin"}, {"id": "other", "text": "of other things"}])
        twins = {key_of(engine, chunk) for chunk in engine.retriever.chunks("twin")}
        other = {key_of(engine, chunk) for chunk in engine.retriever.chunks("other")}
        ask(engine, documents=engine.retriever.chunks("long")[:3])
        engine.drain()
        for id_, left in (("long", twins), ("twin", set())):
            if change == "deleted":
                engine.documents.delete(id_)
                assert stored(engine) == left | other
            else:
                engine.ingest([{"id": id_, "text": "zebra " * 15}])
                new = {key_of(engine, chunk) for chunk in engine.retriever.chunks(id_)}
                assert stored(engine) == left | other | new
                assert not new & twins

    def test_a_document_that_was_replaced_is_read_anew(self, engine: Engine) -> None:
        """A chunk that was retrieved before and after a replacement stands after the text that its document has then."""
        documents = [FIRST, {**FIRST, "text": f"zebra {FIRST['text']}"}, FIRST]
        for document in documents:
            engine.ingest([document])
            chunks = engine.retriever.chunks(str(FIRST["id"]))
            plan = ask(engine, documents=chunks[-2:]).plan
            assert (plan.hits, plan.misses) == (2, 0)
            assert [segment.key for segment in plan.segments[1:3]] == [str(key_of(engine, chunk)) for chunk in chunks[-2:]]


class TestMisses:
    """What requests miss, and documents that they bring."""

    def test_a_miss_is_filled_under_the_key_that_ingest_gives(self, open_engine: OpenEngine) -> None:
        """After requests that missed every chunk, an ingest of the same documents computes nothing."""
        engine = open_engine()
        for document in (LONG, FIRST):
            assert ask(engine, documents=[document]).plan.misses > 3
        engine.drain()
        filled = stored(engine)
        report = engine.ingest([LONG, FIRST])
        assert (report.computed, report.already_stored) == (0, len(filled))
        assert stored(engine) == filled

    def test_brought_documents_stand_after_their_own_text(self, engine: Engine) -> None:
        """A document that a request brings in several chunks: each stands after those before it, and after no other's."""
        answer = ask(engine, documents=[LONG, {"text": "by itself"}, FIRST])
        places: dict[str, list[tuple[int, ...]]] = {}
        for scored, segment in zip(answer.chunks, answer.plan.segments[1:-1], strict=True):
            before = places.setdefault(scored.chunk.document_id, [])
            assert segment.earlier == tuple(before)
            assert segment.key == str(engine._prefiller.key(segment.token_ids, before))
            before.append(segment.token_ids)
        assert [len(chunks) > 3 for chunks in places.values()] == [True, False, True]
        engine.drain()
        assert ask(engine, documents=[LONG]).plan.misses == 0

    def test_a_part_of_an_unknown_document(self, engine: Engine) -> None:
        """Of a document that is not ingested the chunks that the prompt has are all that is known of it, in their order."""
        first, second, third, *_ = engine.retriever.splitter.split(_document(LONG))
        answer = ask(engine, documents=[third, first])
        assert [segment.earlier for segment in answer.plan.segments[1:-1]] == [(first.token_ids,), ()]
        answer = ask(engine, documents=[second])
        assert answer.plan.segments[1].earlier == ()

    def test_another_text_under_an_ingested_id(self, engine: Engine) -> None:
        """A request's own text under the id of an ingested document has its own context, and none of the ingested one's."""
        own = {**FIRST, "text": str(LONG["text"])}
        for brought in (own, FIRST, own):
            answer = ask(engine, documents=[brought])
            chunks = [scored.chunk.token_ids for scored in answer.chunks]
            earlier = [tuple(chunks[:place]) for place in range(len(chunks))]
            assert [segment.earlier for segment in answer.plan.segments[1:-1]] == earlier


class TestTenants:
    """Keys tell nothing of what others have."""

    def test_a_key_depends_on_no_one_elses_text(self, open_engine: OpenEngine, tmp_path: Path) -> None:
        """A salt's keys of a brought text are the same whether others ingested, brought, or changed anything, or not."""
        chunks: list[Any] = [LONG, {"text": "by itself"}]
        keys = []
        for name, others in (("empty", []), ("full", [*DOCUMENTS, {**FIRST, "id": "long"}])):
            with open_engine(store_dir=tmp_path / name) as engine:
                if others:
                    engine.ingest(others)
                    ask(engine, documents=[{"text": "another's own text"}])
                    engine.drain()
                prepared = engine.prepare("what?", documents=chunks)
                steps = engine.prefill_steps(prepared, cache_salt="one")
                prefilled = _run(steps)
                keys.append([segment.key for segment in prefilled.segments if segment.key])
                engine.drain()
                assert {key for key in stored(engine) if key.namespace == namespace_of("one")} == {
                    key for key in stored(engine) if str(key) in keys[-1]
                }
        assert keys[0] == keys[1]

    def test_a_salt_has_keys_of_its_own(self, engine: Engine) -> None:
        """The same text of another salt, or of none, has another key, and is never found under this one."""
        prepared = engine.prepare("what?", documents=[LONG])
        every = []
        for salt in ("", "one", "two"):
            prefilled = _run(engine.prefill_steps(prepared, cache_salt=salt))
            assert all(segment.tier is None for segment in prefilled.segments if segment.key)
            every.append({segment.key for segment in prefilled.segments if segment.key})
            engine.drain()
        assert not every[0] & every[1]
        assert not every[0] & every[2]
        assert not every[1] & every[2]


def test_documents_are_remembered_up_to_a_number(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents beyond it are looked up again, to the same effect; the ones used last stay."""
    monkeypatch.setattr("cacheblend.service.chunk_contexts.REMEMBERED_DOCUMENTS", 2)
    contexts = ChunkContexts(engine._contexts._context, engine.retriever)
    every = [engine.retriever.chunks(str(document["id"])) for document in DOCUMENTS]
    for chunks in (*every, *every[::-1]):
        earlier = contexts.of_prompt(chunks[-1:])
        assert earlier == (tuple(chunk.token_ids for chunk in chunks[:-1]),)
        assert len(contexts._known) <= 2
    assert {document for document, _ in contexts._known} == {str(document["id"]) for document in DOCUMENTS[:2]}


def _document(raw: dict[str, Any]) -> Document:
    return Document.of(raw)


def _run(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
