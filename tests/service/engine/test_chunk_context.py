"""What a chunk's KV is computed after: the head, the filler, its own document's earlier text, and nothing of anybody else's."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engines import (
    BROUGHT,
    CHUNK_TOKENS,
    DOCUMENTS,
    POSITIONS,
    QUESTION,
    TOP_K,
    OpenEngine,
    ask,
    delete_kv,
    head_of,
    key_of,
    make_model,
)
from prompts import assert_same_kv

from cacheblend.base.errors import ConfigError
from cacheblend.blend import ChunkContext, Fusor
from cacheblend.retriever import Chunk, PlainTokenizer
from cacheblend.service import Engine
from cacheblend.service.engine.chunk_context import POSITIONS_SHARE, chunk_context
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.store import ChunkKey, ChunkKV, context_digest

WORDS = random.Random(0).choices(["for", "while", "class", "with", "else", "name"], k=240)
WINDOW = 4 * CHUNK_TOKENS
LONG = {"id": "long", "text": " ".join(WORDS)}  # of many windows


def stored(engine: Engine) -> set[ChunkKey]:
    return {entry.key for entry in engine.store.ls()}


def kv_of(engine: Engine, key: ChunkKey) -> ChunkKV:
    kv = engine.store.get(key)
    assert kv is not None
    return kv


def key_after(engine: Engine, chunk: Sequence[int], earlier: Sequence[Sequence[int]], filler: Sequence[int] = ()) -> ChunkKey:
    """A chunk's key, made from what it is computed after."""
    context = context_digest(filler, earlier)
    return ChunkKey.of(chunk, prefix_ids=head_of(engine), context=context, model=engine.fusor.fingerprint)


def window_keys(engine: Engine, chunks: Sequence[Chunk]) -> list[ChunkKey]:
    """The keys of a whole document's chunks, in its order, by the windows that it is read in."""
    ids = [chunk.token_ids for chunk in chunks]
    window = min(engine.config.context_document_tokens, POSITIONS // 2)
    earlier = ChunkContext(document_tokens=window).earlier(ids)
    return [key_after(engine, *pair) for pair in zip(ids, earlier, strict=True)]


def salted_keys(engine: Engine, documents: Sequence[dict[str, object]], salt: str) -> list[str | None]:
    """The keys that a salted request over brought documents looks up."""
    request = engine.prepare(QUESTION, documents=documents, cache_salt=salt)
    list(engine.prefill_steps(request))
    assert request.prefill is not None
    return [segment.key for segment in request.prefill.segments]


class TestDocuments:
    """Documents that are replaced, deleted, and missed."""

    def test_a_change_is_computed_as_far_as_it_reaches(self, open_engine: OpenEngine) -> None:
        """Of a replaced document, chunks that changed or stand after the change in a window are computed, the old ones go.

        A chunk whose own text stays has the KV after the new text.
        """
        engine = open_engine(context_document_tokens=WINDOW)
        engine.ingest([LONG, *DOCUMENTS])
        chunks = engine.retriever.chunks("long")
        old = window_keys(engine, chunks)
        others = stored(engine) - set(old)
        words = [*WORDS[:120], "class" if WORDS[120] != "class" else "while", *WORDS[121:]]
        report = engine.ingest([{**LONG, "text": " ".join(words)}])
        new = window_keys(engine, engine.retriever.chunks("long"))
        reached = [at for at, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
        assert reached == list(range(reached[0], reached[-1] + 1))
        assert 0 < reached[0] < reached[-1] < len(old) - 1
        assert (report.computed, report.dropped, report.replaced) == (len(reached), len(reached), 1)
        assert stored(engine) == others | set(new)
        at, ids = reached[-1], [chunk.token_ids for chunk in engine.retriever.chunks("long")]
        assert ids[at] == chunks[at].token_ids
        earlier = ChunkContext(document_tokens=WINDOW).earlier(ids)[at]
        (kv,) = engine.fusor.precompute_document([*earlier, ids[at]], head_of(engine), [len(earlier)], ChunkContext())
        assert_same_kv(kv_of(engine, new[at]), kv)

    def test_a_deleted_document_leaves_nothing(self, open_engine: OpenEngine) -> None:
        """All entries of a deleted document go, but for the same chunks in the same context of another one."""
        engine = open_engine()
        common, one, two = WORDS[:60], WORDS[60:120], WORDS[120:180]
        texts = {"one": [*common, *one], "two": [*common, *two], "three": one}
        engine.ingest([{"id": id_, "text": " ".join(words)} for id_, words in texts.items()])
        keys = {id_: {key_of(engine, chunk) for chunk in engine.retriever.chunks(id_)} for id_ in texts}
        assert keys["one"] & keys["two"]
        assert keys["one"] - keys["two"]
        assert not keys["one"] & keys["three"]
        engine.documents.delete("one")
        assert stored(engine) == keys["two"] | keys["three"]
        engine.documents.delete("two")
        engine.documents.delete("three")
        assert stored(engine) == set()

    def test_the_same_chunk_after_other_text_is_another_entry(self, open_engine: OpenEngine) -> None:
        """A chunk that stands in two documents after different text is stored twice, and goes with each."""
        engine = open_engine()
        other = "class" if WORDS[0] != "class" else "while"
        engine.ingest([{**LONG, "id": "one"}, {"id": "two", "text": " ".join([other, *WORDS[1:]])}])
        one, two = engine.retriever.chunks("one"), engine.retriever.chunks("two")
        assert one[1].token_ids == two[1].token_ids
        keys_one, keys_two = window_keys(engine, one), window_keys(engine, two)
        assert keys_one[1] != keys_two[1]
        assert stored(engine) == {*keys_one, *keys_two}
        engine.documents.delete("one")
        assert stored(engine) == set(keys_two)

    def test_a_filled_miss_is_what_ingest_gives(self, open_engine: OpenEngine, tmp_path: Path) -> None:
        """Chunks of an ingested document that were missed have its very keys and KV: a later ingest computes nothing."""
        engine = open_engine(context_document_tokens=WINDOW)
        engine.ingest([LONG])
        chunks = engine.retriever.chunks("long")
        kvs = {key: kv_of(engine, key) for key in stored(engine)}
        delete_kv(engine)
        for start in reversed(range(0, len(chunks), TOP_K)):
            assert ask(engine, documents=chunks[start : start + TOP_K][::-1]).plan.hits == 0
        engine.drain()
        assert stored(engine) == set(kvs) == set(window_keys(engine, chunks))
        for key, kv in kvs.items():
            filled = kv_of(engine, key)
            assert filled.context == kv.context
            assert_same_kv(filled, kv)
        report = engine.ingest([LONG])
        assert (report.unchanged, report.computed, report.already_stored) == (1, 0, len(chunks))

    @pytest.mark.parametrize(("window", "id_"), [(0, "another"), (WINDOW, "another"), (WINDOW, "for"), (POSITIONS, "another")])
    def test_brought_documents(self, open_engine: OpenEngine, id_: str, window: int) -> None:
        """A document that a request brings has the contexts of its own text, and is not computed when it is ingested later."""
        engine = open_engine(context_document_tokens=window)
        engine.ingest(DOCUMENTS)
        document = {"id": id_, "text": " ".join(WORDS[:100])}
        answer = ask(engine, documents=[BROUGHT[0], document])
        brought = [scored.chunk for scored in answer.chunks]
        assert len(brought) > 3
        keys = [*window_keys(engine, brought[:1]), *window_keys(engine, brought[1:])]
        assert [segment.key for segment in answer.plan.segments[1:-1]] == list(map(str, keys))
        engine.drain()
        assert set(keys) <= stored(engine)
        assert engine.ingest([document, BROUGHT[0]]).computed == 0


def test_no_other_tenants_text(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A salted request's keys are the same whatever is ingested, brought by others, or stands beside it in the prompt."""
    alone = open_engine(store_dir=tmp_path / "alone")
    document = {"id": "for", "text": " ".join(WORDS[:60])}
    expected = salted_keys(alone, [document], "mine")
    engine = open_engine()
    engine.ingest(DOCUMENTS)
    for text in (" ".join(WORDS[60:120]), " ".join([*WORDS[60:80], *WORDS[20:60]])):
        salted_keys(engine, [{**document, "text": text}], "another")
    assert salted_keys(engine, [document], "mine") == expected
    assert salted_keys(engine, [*BROUGHT, document], "mine")[-len(expected) + 1 :] == expected[1:]
    assert salted_keys(engine, [document], "another")[1:-1] != expected[1:-1]  # the namespace is part of a key


def test_what_a_client_brings_shapes_no_ingested_kv(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Whatever clients bring first, under a document's id, with its chunks after text of theirs, its KV is as in a new store.

    Without a salt, so that the keys' namespace is the same; the KV of what they brought is there when the document comes.
    """
    document = {"id": "long", "title": "a title", "text": str(LONG["text"])}
    clean = open_engine(store_dir=tmp_path / "clean")
    clean.ingest([document])
    chunks = clean.retriever.chunks("long")
    engine = open_engine()
    hostile = "class while " * CHUNK_TOKENS
    brought: list[Sequence[dict[str, object] | Chunk]] = [
        [{**document, "text": hostile + chunks[3].text + chunks[4].text}],
        [{**document, "title": hostile, "text": chunks[3].text}],
        [replace(chunks[0], text=hostile, token_ids=chunks[5].token_ids), chunks[3], chunks[4]],
        [{"text": chunk.text} for chunk in reversed(chunks[2:6])],
    ]
    for documents in brought:
        ask(engine, documents=documents, max_tokens=1)
        engine.drain()
    assert stored(engine)
    engine.ingest([document])
    assert stored(clean) <= stored(engine)
    for key in stored(clean):
        assert_same_kv(kv_of(engine, key), kv_of(clean, key))
    for documents in brought:
        ask(engine, documents=documents, max_tokens=1)
    answers = [ask(one, documents=one.retriever.chunks("long")[2:5]) for one in (clean, engine)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].plan.misses == 0


def test_the_context_stays_within_the_model(open_engine: OpenEngine) -> None:
    """Behind a long instruction a document is read in smaller windows, and not refused."""
    engine = open_engine(instruction="while " * (POSITIONS // 3))
    assert POSITIONS // 2 < len(head_of(engine)) < POSITIONS - 2 * CHUNK_TOKENS
    report = engine.ingest([LONG])
    assert report.computed == report.chunks == engine.store.stats().nvme.entries
    answer = ask(engine, documents=engine.retriever.chunks("long")[:1], max_tokens=1)
    assert (answer.plan.hits, answer.plan.misses) == (1, 0)


class TestFiller:
    """Passages that every chunk stands after."""

    @pytest.fixture
    def passages(self, tmp_path: Path) -> Path:
        path = tmp_path / "passages.txt"
        path.write_text("while this is so\n\n\n\nwith that name\n\n" + "a class of its own " * POSITIONS, encoding="utf-8")
        return path

    def ids(self, engine: Engine, *passages: str) -> tuple[int, ...]:
        plain = PlainTokenizer(engine.fusor.tokenizer)
        return tuple(token for passage in passages for token in plain.ids(f"{passage}\n\n"))

    def test_a_file(self, open_engine: OpenEngine, passages: Path) -> None:
        """A file's passages stand between head and document, whole, in every chunk's key and KV."""
        engine = open_engine(context_filler=str(passages))
        engine.ingest(DOCUMENTS[:1])
        filler = self.ids(engine, "while this is so", "with that name")
        chunks = [chunk.token_ids for chunk in engine.retriever.chunks()]
        for at, chunk in enumerate(chunks):
            kv = kv_of(engine, key_after(engine, chunk, chunks[:at], filler))
            whole = engine.fusor.precompute_document([filler, *chunks[: at + 1]], head_of(engine), [at + 1], ChunkContext())
            assert_same_kv(kv, next(iter(whole)))
        answer = ask(engine, documents=DOCUMENTS[:1])
        assert (answer.plan.hits, answer.plan.misses) == (len(chunks), 0)
        assert filler[:4] not in [segment.token_ids[:4] for segment in answer.plan.segments]  # no part of the prompt

    def test_none(self, fusor: Fusor, open_engine: OpenEngine) -> None:
        """Without filler and document, a chunk is computed after the head alone."""
        assert chunk_context(fusor, "none", 0) == ChunkContext(document_tokens=0)
        engine = open_engine(context_filler="none", context_document_tokens=0)
        engine.ingest(DOCUMENTS)
        keys = {chunk.token_ids: key_after(engine, chunk.token_ids, ()) for chunk in engine.retriever.chunks()}
        assert stored(engine) == set(keys.values())
        for token_ids, key in keys.items():
            kv = engine.store.get(key)
            assert kv is not None
            assert_same_kv(kv, engine.fusor.precompute(token_ids, head_of(engine)))

    def test_whole_passages_within_an_eighth(self, tmp_path: Path) -> None:
        """Filler ends with the last passage that fits into an eighth of the model's positions; a window takes half of them."""
        make_model(tmp_path, positions=2048)
        fusor = Fusor.from_pretrained(str(tmp_path))
        plain = PlainTokenizer(fusor.tokenizer)
        many = tmp_path / "many.txt"
        many.write_text("\n\n".join(f"passage {number} of them" for number in range(100)))
        filler, length = chunk_context(fusor, str(many), 10**6).filler_ids, 0
        for number in range(100):
            ids = tuple(plain.ids(f"passage {number} of them\n\n"))
            if length + len(ids) > 2048 // POSITIONS_SHARE:
                break
            assert filler[length : length + len(ids)] == ids
            length += len(ids)
        assert 0 < len(filler) == length <= 2048 // 8
        assert chunk_context(fusor, "none", 10**6).document_tokens == 1024
        packaged = chunk_context(fusor, "auto", 0).filler_ids
        assert 0 < len(packaged) <= 2048 // 8
        assert fusor.tokenizer.decode(packaged).endswith("\n\n")

    @pytest.mark.parametrize("content", [None, b"", b" \n\n ", b"\xff\xfe"], ids=["missing", "empty", "blank", "not UTF-8"])
    def test_unusable_files(self, open_engine: OpenEngine, tmp_path: Path, content: bytes | None) -> None:
        """A file that is missing, without text or not UTF-8 is refused by name, before a store is made."""
        path = tmp_path / "filler.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"context_filler.*filler\.txt"):
            open_engine(context_filler=str(path))
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("change", ["instruction", "filler", "document"])
def test_a_store_of_another_context(open_ingested: OpenEngine, tmp_path: Path, change: str) -> None:
    """A store made with another instruction, filler or window opens; its entries are misses, and nothing of it is lost."""
    filler = tmp_path / "filler.txt"
    filler.write_text("while this is so")
    options: dict[str, object] = {
        "instruction": {"instruction": f"{INSTRUCTION}In a word.\n\n"},
        "filler": {"context_filler": str(filler)},
        "document": {"context_document_tokens": 1},  # every chunk alone
    }[change]
    with open_ingested() as engine:
        before, documents, whole = stored(engine), engine.documents.page()[0], ask(engine)
    with open_ingested(**options) as engine:
        assert (stored(engine), engine.documents.page()[0]) == (before, documents)
        answer = ask(engine)
        firsts = sum(not scored.chunk.position for scored in answer.chunks)
        hits = firsts if change == "document" else 0  # a first chunk has no text of its document before it
        assert (answer.plan.hits, answer.plan.misses) == (hits, TOP_K - hits)
        engine.drain()
        assert ask(engine).plan.hits == TOP_K
        assert len(stored(engine)) == len(before) + TOP_K - hits
    with open_ingested() as engine:
        again = ask(engine)
        assert (again.plan.hits, again.token_ids) == (TOP_K, whole.token_ids)
        assert engine.ingest(DOCUMENTS).computed == 0
    with open_ingested(**options) as engine:
        assert engine.ingest(DOCUMENTS).dropped == 0
        assert before < stored(engine)
        for document in DOCUMENTS:
            engine.documents.delete(str(document["id"]))
        assert stored(engine) == set()  # under either context
