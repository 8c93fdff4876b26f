"""Methods: all see the same prompt; exact ones are exact, the others recompute what they say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeEmbedder
from prompts import assert_same_kv

from cacheblend.base.errors import ConfigError
from cacheblend.blend import DEFAULT_RATIO, Fusor
from cacheblend.blend.fidelity import relative_kv_error
from cacheblend.eval.data import FileSource, Request
from cacheblend.eval.method_plan import CONTEXTS, METHODS, plan_methods
from cacheblend.eval.methods import EverythingCached, MethodAnswer, ResidentRequest, SeenBefore, StoredContexts, make_methods

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def request_(fusor: Fusor, source: FileSource, embedder: FakeEmbedder) -> Request:
    of_two_documents = replace(source, preset=replace(source.preset, num_chunks=9))
    return next(of_two_documents.requests(fusor.tokenizer, None, embedder))


@pytest.fixture(scope="module")
def resident(fusor: Fusor, request_: Request) -> ResidentRequest:
    cached, prefix = EverythingCached().cached(request_.prompt.chunk_ids)
    return ResidentRequest(fusor, request_, StoredContexts(fusor, request_.prompt.prefix), cached, prefix)


@pytest.fixture(scope="module")
def answers(fusor: Fusor, resident: ResidentRequest) -> dict[str, MethodAnswer]:
    """Every method's, at ratio 0.3."""
    made = make_methods(plan_methods(METHODS, [0.3]), fusor)
    found = {}
    for name, method in made.items():
        method.prepare(resident)
        found[name] = method.answer(resident, NEW_TOKENS)
    return found


def _deviation(answer: MethodAnswer, answers: dict[str, MethodAnswer]) -> float:
    return relative_kv_error(answer.fused.cache, answers["full_recompute"].fused.cache)


def test_all_read_the_same_prompt(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Methods differ by their prefill alone: all have the request's token ids in their cache."""
    assert set(answers) == set(METHODS)
    assert all(answer.fused.token_ids == request_.prompt.token_ids for answer in answers.values())
    assert all(len(answer.token_ids) == NEW_TOKENS and answer.ttft_s > 0 for answer in answers.values())


def test_prefix_caching_is_exact(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Prefix caching answers as full recompute does, and runs only what stands after the first chunk."""
    full, prefix = answers["full_recompute"], answers["prefix_cache"]
    assert prefix.token_ids == full.token_ids
    assert _deviation(prefix, answers) < 1e-9
    assert prefix.recomputed_tokens == full.recomputed_tokens - len(request_.prompt.prefix) - len(request_.prompt.chunk_ids[0])
    assert prefix.loaded_bytes > 0 == full.loaded_bytes


def test_each_method_recomputes_its_share(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Full reuse runs the question alone; blending and its control the same number of tokens; EPIC the chunks' starts."""
    question = len(request_.prompt.suffix)
    reusable = sum(map(len, request_.prompt.chunk_ids))
    assert answers["full_reuse"].recomputed_tokens == question
    for name in ("blend", "blend_hkvd", "blend_single_shot", "epic"):
        assert answers[name].recomputed_tokens == pytest.approx(question + 0.3 * reusable, abs=2)
    epic = answers["epic"].fused
    start = len(request_.prompt.prefix)
    assert epic.recomputed[0][:3].tolist() == [start, start + 1, start + 2]
    assert all(positions.tolist() == epic.recomputed[0].tolist() for positions in epic.recomputed)


def test_recomputing_mends_the_kv(fusor: Fusor, resident: ResidentRequest, answers: dict[str, MethodAnswer]) -> None:
    """HKVD tokens leave less deviation than full reuse and than random tokens, and every blend none at ratio 1."""
    left = {name: _deviation(answers[name], answers) for name in ("full_reuse", "blend_hkvd", "epic")}
    assert left["blend_hkvd"] < left["epic"] < left["full_reuse"]
    (none,) = make_methods(plan_methods(["epic"], [0.0]), fusor).values()
    assert _deviation(none.answer(resident, 1), answers) == pytest.approx(left["full_reuse"])
    (whole,) = make_methods(plan_methods(["blend"], [1.0]), fusor).values()
    assert _deviation(whole.answer(resident, 1), answers) < 1e-9


def test_bytes_loaded_leave_layer_0_out_where_it_runs(answers: dict[str, MethodAnswer], resident: ResidentRequest) -> None:
    """Selectors by KV deviation load all layers but the first of every chunk; full reuse and other selectors load all."""
    head = 0 if resident.head_kv is None else resident.head_kv.nbytes
    chunks = sum(kv.nbytes for kv in resident.chunk_kv() if kv is not None)
    for name in ("full_reuse", "epic", "blend"):
        assert answers[name].loaded_bytes == head + chunks
    for name in ("blend_hkvd", "blend_single_shot"):
        assert answers[name].loaded_bytes == head + chunks * 3 // 4


def test_contexts(fusor: Fusor, request_: Request, source: FileSource, embedder: FakeEmbedder, tmp_path: Path) -> None:
    """Each name is another context of the chunks' KV, which is the model's own after just that, and gives other logits."""
    *_, other_request = source.requests(fusor.tokenizer, None, embedder)
    other = other_request.prompt.chunk_ids[0]
    (tmp_path / "filler.txt").write_text(fusor.tokenizer.decode(other[:40]))
    prompt = request_.prompt
    contexts = StoredContexts(fusor, prompt.prefix, str(tmp_path / "filler.txt"))
    resident = ResidentRequest(fusor, request_, contexts, *EverythingCached().cached(prompt.chunk_ids))
    filler = contexts["default"][1].filler_ids
    assert filler
    assert any(chunk.earlier for chunk in prompt.chunks)
    bos = (fusor.tokenizer.bos_token_id,)
    for index, (chunk, earlier) in enumerate((one.token_ids, one.earlier) for one in prompt.chunks):
        expected = {
            "default": (prompt.prefix, (*filler, *_joined(earlier))),
            "filler": (prompt.prefix, filler),
            "document": (prompt.prefix, _joined(earlier)),
            "neighbour": (prompt.prefix, prompt.chunk_ids[index - 1]),
            "head": (prompt.prefix, ()),
            "bos": (bos, ()),
        }
        assert tuple(expected) == CONTEXTS
        for name, (prefix, between) in expected.items():
            kv = resident.chunk_kv(name)[index]
            assert kv is not None
            assert (kv.token_ids, kv.prefix_ids) == (chunk, prefix)
            assert_same_kv(kv, replace(fusor.precompute(chunk, [*prefix, *between]), prefix_ids=prefix))
        # The neighbour may be what stands before it in its document.
        assert len(set(expected.values())) >= (5 if earlier else 4)
    methods = make_methods(plan_methods(["full_reuse"], [DEFAULT_RATIO], CONTEXTS), fusor)
    logits = {}
    for label, method in methods.items():
        method.prepare(resident)
        logits[label] = tuple(method.answer(resident, 1).fused.logits.tolist())
    assert len(set(logits.values())) == len(CONTEXTS)


def _joined(chunks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk)


def test_a_chunk_not_yet_seen_is_a_hole(fusor: Fusor, request_: Request) -> None:
    """With nothing in the cache blending and prefix caching are full recompute; what a request used is there for the next."""
    history = SeenBefore()
    chunks = request_.prompt.chunk_ids
    assert history.cached(chunks) == ((False,) * len(chunks), 0)
    cold = ResidentRequest(fusor, request_, StoredContexts(fusor, request_.prompt.prefix), *history.cached(chunks))
    for name, method in make_methods(plan_methods(METHODS, [0.3]), fusor).items():
        method.prepare(cold)
        found = method.answer(cold, 1).fused.cache
        assert relative_kv_error(found, fusor.prefill(request_.prompt.token_ids).cache) < 1e-9, name
    history.remember(chunks)
    assert history.cached((*chunks[:2], *reversed(chunks))) == ((True,) * (len(chunks) + 2), 2)
    assert history.cached(chunks[1:]) == ((True,) * (len(chunks) - 1), 0)


def test_methods_and_ratios_are_checked() -> None:
    """Ratios apply to the methods that take one, unknown names are refused with the known ones."""
    assert [method.label for method in plan_methods(["blend"], [0.1])] == ["blend"]
    planned = plan_methods(["full_recompute", "full_reuse", "blend"], [0.1, 0.5], ["default", "head"])
    assert [(method.label, method.context) for method in planned] == [
        ("full_recompute", "default"),
        ("full_reuse", "default"),
        ("full_reuse+head", "head"),
        ("blend@0.1", "default"),
        ("blend@0.5", "default"),
        ("blend+head@0.1", "head"),
        ("blend+head@0.5", "head"),
    ]
    assert [method.label for method in plan_methods(["blend"], [0.1], ["bos"])] == ["blend+bos"]
    for names, ratios, contexts, says in (
        (["magic"], [0.1], ["bos"], "full_recompute, prefix_cache"),
        ([], [0.1], ["bos"], "at least one"),
        (["blend", "blend"], [0.1], ["bos"], "each once"),
        (["blend"], [], ["bos"], "at least one"),
        (["blend"], [1.5], ["bos"], "0 to 1"),
        (["blend"], [0.1], ["magic"], "default, filler, document"),
        (["blend"], [0.1], [], "at least one"),
        (["blend"], [0.1], ["bos", "bos"], "each once"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan_methods(names, ratios, contexts)
