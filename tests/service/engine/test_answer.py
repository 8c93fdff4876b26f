import dataclasses
import itertools
import json
import math
import threading
from typing import Any

import pytest
import torch
from engines import BROUGHT, DOCUMENTS, ODD_DOCUMENTS, QUESTION, TOP_K, OpenEngine, ask, furthest, key_of, kinds, prompt_of

from cacheblend.blend import FusionConfig, Fusor
from cacheblend.retriever import PlainTokenizer
from cacheblend.service import Answer, Engine
from cacheblend.service.engine.prefill import PrefillSteps
from cacheblend.service.engine.request import METHODS, Request
from cacheblend.store import BLOCK_TOKENS


def test_methods_run_the_same_tokens(engine: Engine) -> None:
    """All four methods run one and the same prompt, in which each chunk's ids are those it was stored under."""
    warm = {method: ask(engine, method) for method in (*METHODS, *METHODS) if engine.drain() is None}
    prompts = {prompt_of(answer.plan) for answer in warm.values()}
    assert len(prompts) == 1
    (prompt,) = prompts
    plain = PlainTokenizer(engine.fusor.tokenizer)
    chunks = [scored.chunk for scored in warm["blend"].chunks]
    assert prompt == (
        *(engine.fusor.tokenizer.bos_token_id, *plain.ids(engine.config.instruction)),
        *(token for chunk in chunks for token in chunk.token_ids),
        *(*plain.ids("Question: "), *plain.ids(QUESTION), *plain.ids("\nAnswer:")),
    )
    assert {answer.plan.prompt_tokens for answer in warm.values()} == {len(prompt)}
    assert {method: answer.plan.method for method, answer in warm.items()} == dict(zip(METHODS, METHODS, strict=True))
    assert kinds(warm["full_recompute"]) == ["fresh"] * (TOP_K + 2)
    assert kinds(warm["prefix_cache"]) == ["exact", "fresh"]
    assert kinds(warm["full_reuse"]) == kinds(warm["blend"]) == ["exact", *["reused"] * TOP_K, "fresh"]


@pytest.mark.parametrize("selector", ["question_attention", "gradual"])
def test_plan_counts(open_ingested: OpenEngine, selector: str) -> None:
    """A plan tells how many tokens were reusable, how many were recomputed, and where, by the ratio asked for."""
    engine = open_ingested(selector=selector)
    answer = ask(engine, recompute_ratio=0.25)
    plan = answer.plan
    reusable = sum(len(scored.chunk.token_ids) for scored in answer.chunks)
    assert (plan.hits, plan.misses, plan.recompute_ratio, plan.loading) == (TOP_K, 0, 0.25, None)
    assert plan.reusable_tokens == reusable
    assert plan.recomputed_tokens == pytest.approx(0.25 * reusable, abs=1)
    exact, tail = len(plan.segments[0].token_ids), len(plan.segments[-1].token_ids)
    if selector == "gradual":  # the paper's layer 0 runs whole
        assert plan.recomputed[0].tolist() == list(range(exact, plan.prompt_tokens))
    else:
        assert torch.equal(plan.recomputed[0], plan.recomputed[1])
    counts = FusionConfig(selector=selector).schedule.counts(reusable, len(plan.recomputed), 0.25)
    assert [len(positions) - tail for positions in plan.recomputed] == counts
    assert all(set(later.tolist()) <= set(earlier.tolist()) for earlier, later in itertools.pairwise(plan.recomputed))
    mean = sum(len(positions) - tail for positions in plan.recomputed[1:]) / (len(plan.recomputed) - 1)
    assert plan.recomputed_tokens == round(mean)
    assert [segment.key for segment in plan.segments] == [
        None,
        *(str(key_of(engine, scored.chunk)) for scored in answer.chunks),
        None,
    ]
    documents = {scored.chunk.document_id: engine.retriever.chunks(scored.chunk.document_id) for scored in answer.chunks}
    assert [segment.earlier for segment in plan.segments[1:-1]] == [
        tuple(chunk.token_ids for chunk in documents[scored.chunk.document_id][: scored.chunk.position])
        for scored in answer.chunks
    ]


def test_ratio_1_is_full_recompute(engine: Engine) -> None:
    """A blend at ratio 1.0 gives full recompute's logits and its greedy tokens."""
    blend, full = ask(engine, recompute_ratio=1.0), ask(engine, "full_recompute")
    assert furthest(blend, full) <= 1e-4
    assert blend.token_ids == full.token_ids
    assert blend.plan.hits == TOP_K


def test_full_reuse_recomputes_the_question_alone(open_engine: OpenEngine) -> None:
    """Full reuse runs nothing but the question, whatever ratio the engine has, and differs from full recompute.

    The chunks are computed without their documents' text: with it the tiny model's full reuse loses hardly more than a blend.
    """
    engine = open_engine(context_document_tokens=0)
    engine.ingest(DOCUMENTS)
    reuse = ask(engine, "full_reuse")
    tail = len(reuse.plan.segments[-1].token_ids)
    everywhere = list(range(reuse.plan.prompt_tokens - tail, reuse.plan.prompt_tokens))
    assert [positions.tolist() for positions in reuse.plan.recomputed] == [everywhere] * 4
    assert (reuse.plan.recompute_ratio, reuse.plan.recomputed_tokens, reuse.plan.hits) == (0, 0, TOP_K)
    full = ask(engine, "full_recompute")
    assert furthest(reuse, full) > 1e-2
    assert furthest(ask(engine), full) < furthest(reuse, full)


@pytest.mark.parametrize("chunks", [1, 2, None])
def test_full_reuse_of_a_document_is_exact(engine: Engine, chunks: int | None) -> None:
    """A document's chunks from its first one on, right after the prompt's head, lose nothing by full reuse."""
    documents = engine.retriever.chunks("while")[:chunks]
    reuse, full = ask(engine, "full_reuse", documents=documents), ask(engine, "full_recompute", documents=documents)
    assert kinds(reuse) == ["exact", *["reused"] * len(documents), "fresh"]
    assert furthest(reuse, full) <= 1e-4
    assert reuse.token_ids == full.token_ids


def test_prefix_cache(engine: Engine) -> None:
    """Prefix caching misses first and hits later, in full blocks and always with full recompute's logits."""
    full = ask(engine, "full_recompute")
    miss, hit = ask(engine, "prefix_cache"), ask(engine, "prefix_cache")
    assert [(answer.plan.hits, answer.plan.misses) for answer in (full, miss, hit)] == [(0, 0), (0, 1), (1, 0)]
    assert kinds(miss) == ["fresh"] * (TOP_K + 2)
    run = len(hit.plan.segments[0].token_ids)
    assert run == (hit.plan.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [int(positions[0]) for positions in hit.plan.recomputed] == [run] * 4
    assert hit.plan.loaded_bytes == {"memory": 4 * engine.fusor.decoder.geometry.layer_bytes(run)}
    for answer in (miss, hit):
        assert furthest(answer, full) <= 1e-4
        assert answer.token_ids == full.token_ids


def test_documents_brought_along(engine: Engine) -> None:
    """Documents brought along stand in the prompt whole and in their order; nothing is searched, and nothing is indexed."""
    brought = [*ODD_DOCUMENTS, DOCUMENTS[1]]
    known = engine.retriever.documents()
    first = ask(engine, documents=brought)
    assert "".join(scored.chunk.text for scored in first.chunks) == "".join(
        f"{document['title']}\n{document['text']}" if document.get("title") else str(document["text"]) for document in brought
    )
    assert all(math.isnan(scored.distance) for scored in first.chunks)
    assert first.timings.retrieve_s >= 0
    new = len(first.chunks) - sum(scored.chunk.title == "while" for scored in first.chunks)
    assert first.plan.misses == new > 0
    assert first.plan.hits == len(first.chunks) - new > 0
    engine.drain()
    second = ask(engine, documents=brought)
    assert (second.plan.hits, second.plan.misses) == (len(first.chunks), 0)
    assert engine.retriever.documents() == known


def test_the_same_document_twice(engine: Engine) -> None:
    """One document given twice is one miss computed once, and reused at both places afterwards."""
    twice = BROUGHT * 2
    entries = engine.store.stats().nvme.entries
    assert kinds(ask(engine, documents=twice)) == ["exact", "fresh", "fresh", "fresh"]
    engine.drain()
    assert engine.store.stats().nvme.entries == entries + 1
    blend = ask(engine, documents=twice, recompute_ratio=1.0)
    assert kinds(blend) == ["exact", "reused", "reused", "fresh"]
    assert furthest(blend, ask(engine, "full_recompute", documents=twice)) <= 1e-4


def test_two_threads(engine: Engine) -> None:
    """Requests of every method in two threads, beside an ingest, give what each gives alone."""
    questions = [QUESTION, "How is a class defined with bases?"]
    asked = [
        {"question": question, "method": method, "documents": documents}
        for documents in ([{"text": str(document["text"])[:120]} for document in DOCUMENTS[:3]], None)
        for question, method in itertools.product(questions, METHODS)
    ]
    for one in asked:  # so that all of it is stored
        engine.answer(**one, num_chunks=TOP_K)
    engine.drain()
    alone = [engine.answer(**one, num_chunks=TOP_K) for one in asked]
    together: dict[int, list[Answer]] = {}
    begin = threading.Barrier(3)

    def work(thread: int) -> None:
        begin.wait()
        together[thread] = [engine.answer(**one, num_chunks=TOP_K) for one in (asked if thread else asked[::-1])]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in (0, 1)]
    for thread in threads:
        thread.start()
    begin.wait()
    engine.ingest([{"id": "elsewhere", "text": "zebra " * 30}])
    for thread in threads:
        thread.join()
    for answers in (together[0][::-1], together[1]):
        for one, other in zip(alone, answers, strict=True):
            assert other.token_ids == one.token_ids
            assert furthest(one, other) <= 1e-5
            assert kinds(one) == kinds(other)
            assert all(torch.equal(a, b) for a, b in zip(one.plan.recomputed, other.plan.recomputed, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_timings(engine: Engine, method: str, max_tokens: int) -> None:
    """Stages are parts of the whole, none is negative, and retrieval is outside the time to first token."""
    search, pause = engine.retriever.search, threading.Event()

    def slow_search(*given: Any) -> object:
        pause.wait(0.2)
        return search(*given)

    engine.retriever.search = slow_search  # type: ignore[assignment]  # a stand-in
    timings = ask(engine, method, max_tokens=max_tokens).timings
    assert min(dataclasses.astuple(timings)) >= 0
    assert timings.retrieve_s >= 0.2
    assert 0 < timings.ttft_s < timings.total_s
    assert timings.retrieve_s + timings.ttft_s + timings.decode_s == pytest.approx(timings.total_s)


def test_first_token_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to first token ends with the first token: it has the prefill in it, and no step of decoding."""
    pause, decode, steps = threading.Event(), engine.fusor.decoder.decode, engine.prefill_steps

    def slow(*given: Any) -> Any:
        pause.wait(0.2)
        return decode(*given)

    def slow_prefill(request: Request) -> PrefillSteps:
        pause.wait(0.5)
        yield from steps(request)

    monkeypatch.setattr(engine.fusor.decoder, "decode", slow)
    monkeypatch.setattr(engine, "prefill_steps", slow_prefill)
    timings = ask(engine, max_tokens=3).timings
    assert timings.ttft_s >= 0.5
    assert timings.decode_s >= 0.4


def test_sampling(engine: Engine) -> None:
    """With a temperature tokens are drawn: the same for the same seed, others for other seeds, greedy ones where it is 0."""

    def sample(seed: int, **options: float) -> list[int]:
        return ask(engine, seed=seed, **options).token_ids

    greedy = ask(engine).token_ids
    drawn = [sample(seed, temperature=2.0) for seed in range(4)]
    assert drawn == [sample(seed, temperature=2.0) for seed in range(4)]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    assert all(sample(seed, temperature=0.0) == greedy for seed in range(2))
    assert all(
        sample(seed, temperature=2.0, top_p=0.0) == sample(seed, temperature=2.0, top_k=1) == greedy for seed in range(2)
    )


def test_stops_at_the_end_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation stops after the model's end token, which is in the ids and not in the text."""
    long = ask(engine, max_tokens=12)
    assert len(long.token_ids) == 12
    assert long.text == engine.fusor.tokenizer.decode(long.token_ids)
    at, end = next((at, token) for at, token in enumerate(long.token_ids) if at > 0 and token not in long.token_ids[:at])
    monkeypatch.setattr(engine.fusor.model.generation_config, "eos_token_id", end)
    short = ask(engine, max_tokens=12)
    assert short.token_ids == long.token_ids[: at + 1]
    special = engine.fusor.tokenizer.eos_token_id
    ended = ask(engine, max_tokens=12, logit_bias={special: 1e9})
    assert (ended.token_ids[0], ended.text) == (special, "")


def test_as_dict(engine: Engine) -> None:
    """An answer as plain values is JSON that strict parsers read, by every method and with documents brought along."""
    for method, documents in itertools.product(METHODS, (None, ODD_DOCUMENTS)):
        answer = ask(engine, method, documents=documents)
        plain = json.loads(json.dumps(answer.as_dict(), allow_nan=False))
        assert plain["token_ids"] == answer.token_ids
        assert plain["plan"]["recomputed_per_layer"] == [len(positions) for positions in answer.plan.recomputed]
        assert [chunk["tokens"] for chunk in plain["chunks"]] == [len(scored.chunk.token_ids) for scored in answer.chunks]
        assert (plain["chunks"][0]["distance"] is None) == (documents is not None)
        assert sum(segment["tokens"] for segment in plain["plan"]["segments"]) == plain["plan"]["prompt_tokens"]


def test_no_bos_and_no_instruction(open_engine: OpenEngine, fusor: Fusor) -> None:
    """A model without BOS and without an instruction has an empty head: all methods work on chunks and question alone."""
    tokenizer = type(fusor.tokenizer)(tokenizer_object=fusor.tokenizer.backend_tokenizer, eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = None
    engine = open_engine(fusor=Fusor(fusor.model, tokenizer), instruction="")
    engine.ingest(DOCUMENTS)
    full = ask(engine, "full_recompute")
    for method, ratio in (("prefix_cache", None), ("prefix_cache", None), ("blend", 1.0)):
        answer = ask(engine, method, recompute_ratio=ratio)
        engine.drain()
        assert furthest(answer, full) <= 1e-4
        assert prompt_of(answer.plan) == prompt_of(full.plan)
    assert kinds(ask(engine)) == ["reused"] * TOP_K + ["fresh"]
    assert prompt_of(full.plan)[: len(full.chunks[0].chunk.token_ids)] == full.chunks[0].chunk.token_ids
