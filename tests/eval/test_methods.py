"""Methods: all see the same prompt; exact ones are exact, the others recompute what they say."""

from __future__ import annotations

import pytest

from cacheblend.blend import Fusor
from cacheblend.eval.data import Request, WorldSource
from cacheblend.eval.data.wording import WORLD
from cacheblend.eval.methods import (
    METHODS,
    EverythingCached,
    MethodAnswer,
    ResidentRequest,
    SeenBefore,
    make_methods,
    plan_methods,
)
from cacheblend.eval.metrics import deviation_left
from cacheblend.store.errors import ConfigError

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def request_(fusor: Fusor) -> Request:
    return next(WorldSource(seed=1, cases=1).requests(fusor.tokenizer, None))


@pytest.fixture(scope="module")
def resident(fusor: Fusor, request_: Request) -> ResidentRequest:
    cached, prefix = EverythingCached().cached(request_.pieces.chunks)
    return ResidentRequest(fusor, request_, (fusor.tokenizer.bos_token_id,), cached, prefix)


@pytest.fixture(scope="module")
def answers(fusor: Fusor, resident: ResidentRequest) -> dict[str, MethodAnswer]:
    """Every method's, at ratio 0.3."""
    made = make_methods(plan_methods(METHODS, [0.3]), fusor, WORLD)
    found = {}
    for name, method in made.items():
        method.prepare(resident)
        found[name] = method.answer(resident, NEW_TOKENS)
    return found


def _deviation(answer: MethodAnswer, answers: dict[str, MethodAnswer]) -> float:
    full = answers["full_recompute"].fused
    assert answer.fused is not None
    assert full is not None
    return deviation_left(answer.fused.cache, full.cache)


def test_all_read_the_same_prompt(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Methods that differ by their prefill alone have the request's token ids in their cache."""
    fused = {name: answer.fused for name, answer in answers.items() if answer.fused is not None}
    assert set(METHODS) - set(fused) == {"map_reduce", "map_rerank"}
    assert all(prompt.token_ids == request_.pieces.token_ids for prompt in fused.values())
    assert all(len(answer.token_ids) == NEW_TOKENS and answer.ttft_s > 0 for answer in answers.values())


def test_prefix_caching_is_exact(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Prefix caching answers as full recompute does, and runs only what stands behind the first chunk."""
    full, prefix = answers["full_recompute"], answers["prefix_cache"]
    assert prefix.token_ids == full.token_ids
    assert _deviation(prefix, answers) < 1e-9
    assert prefix.recomputed_tokens == full.recomputed_tokens - len(request_.pieces.head) - len(request_.pieces.chunks[0])
    assert prefix.loaded_bytes > 0 == full.loaded_bytes


def test_each_method_recomputes_its_share(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """Full reuse runs the question alone; blending and its control the same number of tokens; EPIC the chunks' starts."""
    question = len(request_.pieces.tail)
    reusable = sum(map(len, request_.pieces.chunks))
    assert answers["full_reuse"].recomputed_tokens == question
    for name in ("blend", "blend_single_shot", "random_tokens"):
        assert answers[name].recomputed_tokens == pytest.approx(question + 0.3 * reusable, abs=1)
    epic = answers["epic"].fused
    assert epic is not None
    start = len(request_.pieces.head)
    assert epic.recomputed[0][:3].tolist() == [start, start + 1, start + 2]
    assert all(positions.tolist() == epic.recomputed[0].tolist() for positions in epic.recomputed)


def test_recomputing_mends_the_kv(fusor: Fusor, resident: ResidentRequest, answers: dict[str, MethodAnswer]) -> None:
    """Blending leaves less deviation than full reuse and than random tokens, and none at ratio 1."""
    left = {name: _deviation(answers[name], answers) for name in ("full_reuse", "blend", "random_tokens")}
    assert left["blend"] < left["random_tokens"] < left["full_reuse"]
    (none,) = make_methods(plan_methods(["random_tokens"], [0.0]), fusor, WORLD).values()
    assert _deviation(none.answer(resident, 1), answers) == pytest.approx(left["full_reuse"])
    (whole,) = make_methods(plan_methods(["blend"], [1.0]), fusor, WORLD).values()
    assert _deviation(whole.answer(resident, 1), answers) < 1e-9


def test_bytes_loaded_leave_layer_0_out_where_it_runs(answers: dict[str, MethodAnswer], resident: ResidentRequest) -> None:
    """Blending loads all layers but the first of every chunk, full reuse and EPIC all of them."""
    head = 0 if resident.head_kv is None else resident.head_kv.nbytes
    chunks = sum(kv.nbytes for kv in resident.chunk_kv if kv is not None)
    assert answers["full_reuse"].loaded_bytes == answers["epic"].loaded_bytes == head + chunks
    assert answers["blend"].loaded_bytes == answers["random_tokens"].loaded_bytes == head + chunks * 3 // 4


def test_map_methods_read_every_chunk_alone(answers: dict[str, MethodAnswer], request_: Request) -> None:
    """MapRerank runs the question once a chunk and nothing of the chunks themselves; MapReduce one prompt more."""
    rerank, reduce = answers["map_rerank"], answers["map_reduce"]
    assert rerank.recomputed_tokens == len(request_.pieces.chunks) * len(request_.pieces.tail)
    assert reduce.recomputed_tokens > rerank.recomputed_tokens
    assert rerank.loaded_bytes == reduce.loaded_bytes > answers["full_reuse"].loaded_bytes


def test_a_chunk_not_yet_seen_is_a_hole(fusor: Fusor, request_: Request) -> None:
    """With nothing in the cache blending and prefix caching are full recompute; what a request used is there for the next."""
    history = SeenBefore()
    chunks = request_.pieces.chunks
    assert history.cached(chunks) == ((False,) * len(chunks), 0)
    cold = ResidentRequest(fusor, request_, (fusor.tokenizer.bos_token_id,), *history.cached(chunks))
    for name, method in make_methods(plan_methods(METHODS, [0.3]), fusor, WORLD).items():
        method.prepare(cold)
        answer = method.answer(cold, 1)
        if answer.fused is not None:
            assert deviation_left(answer.fused.cache, fusor.prefill(request_.pieces.token_ids).cache) < 1e-9, name
    history.remember(chunks)
    assert history.cached((*chunks[:2], *reversed(chunks))) == ((True,) * (len(chunks) + 2), 2)
    assert history.cached(chunks[1:]) == ((True,) * (len(chunks) - 1), 0)


def test_methods_and_ratios_are_checked() -> None:
    """Ratios apply to the methods that take one, unknown names are refused with the known ones."""
    labels = [method.label for method in plan_methods(["full_reuse", "blend", "epic"], [0.1, 0.5])]
    assert labels == ["full_reuse", "blend@0.1", "blend@0.5", "epic@0.1", "epic@0.5"]
    assert [method.label for method in plan_methods(["blend"], [0.1])] == ["blend"]
    for names, ratios, says in (
        (["magic"], [0.1], "full_recompute, prefix_cache"),
        ([], [0.1], "at least one"),
        (["blend", "blend"], [0.1], "each once"),
        (["blend"], [], "at least one"),
        (["blend"], [1.5], "0 to 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan_methods(names, ratios)
