"""Blending inside a running vLLM: what it answers, what its prefix cache holds afterwards, what becomes of failures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_engines import VOCAB, MakeModel, OpenServed, Served, first_logprobs

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import FusionConfig, Fusor, Segment
from cacheblend.store import KVStore, StoreConfig

DRAW = random.Random(5)
HEAD = [DRAW.randrange(2, VOCAB) for _ in range(40)]
CHUNKS = [[DRAW.randrange(2, VOCAB) for _ in range(size)] for size in (70, 66, 72)]
QUESTION = [DRAW.randrange(2, VOCAB) for _ in range(9)]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "phi3", "mixtral"]


def prompt(*order: int) -> tuple[list[int], list[list[int]]]:
    """The prompt over chunks in an order, and where they stand."""
    tokens, spans = list(HEAD), list[list[int]]()
    for index in order:
        spans.append([len(tokens), len(tokens) + len(CHUNKS[index])])
        tokens += CHUNKS[index]
    return [*tokens, *QUESTION], spans


def own_logits(fusor: Fusor, served: Served, order: tuple[int, ...], ratio: float) -> torch.Tensor:
    """Log probabilities that the project's own fusor gives, over the very entries that vLLM's worker has stored."""
    keys = served.connector._worker._keys
    assert keys.model == fusor.fingerprint
    with KVStore(StoreConfig(directory=served.store / "kv")) as store:
        kvs = [store.get(keys.key(CHUNKS[index], (), None)) for index in order]
    assert None not in kvs
    chunks = [Segment(CHUNKS[index], kv) for index, kv in zip(order, kvs, strict=True)]
    fused = fusor.fuse([Segment(HEAD), *chunks, Segment(QUESTION)], FusionConfig(recompute_ratio=ratio))
    return torch.log_softmax(fused.logits, dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_blends_are_the_projects_own(
    name: str, make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ratio 1.0 an answer is vLLM's own; at a lower one it is that of the project's fusor on the same entries; and the exact
    prompt afterwards finds nothing of it in the prefix cache.
    """
    monkeypatch.setattr("cacheblend.integrations.vllm.scheduler.LARGEST_SHARE", 9.0)  # also where it is no gain
    folder = make_model(name)
    fusor = Fusor.from_pretrained(str(folder))
    with open_served(folder) as served:
        served.precompute(*([chunk] for chunk in CHUNKS))
        for order in ((0, 1, 2), (2, 0, 1)):
            tokens, spans = prompt(*order)
            exact = served.ask(tokens)
            served.llm.reset_prefix_cache()
            whole = served.ask(tokens, spans, ratio=1.0)
            assert whole.kv_transfer_params["cacheblend"]["hits"] == 3, whole.kv_transfer_params
            assert whole.outputs[0].token_ids == exact.outputs[0].token_ids
            assert float((first_logprobs(whole) - first_logprobs(exact)).abs().max()) < 1e-3
            blended = served.ask(tokens, spans)
            own = own_logits(fusor, served, order, 0.15)
            assert float((first_logprobs(blended) - own).abs().max()) < 1e-3
            assert (
                float((first_logprobs(blended) - first_logprobs(exact)).abs().max()) > 1e-3
            )  # an approximation, seen to be one
            again = served.ask(tokens)
            assert again.num_cached_tokens <= len(HEAD)
            assert float((first_logprobs(again) - first_logprobs(exact)).abs().max()) < 1e-3


@pytest.fixture
def served(make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("cacheblend.integrations.vllm.scheduler.LARGEST_SHARE", 9.0)
    with open_served(make_model("llama")) as served:
        yield served


def test_bfloat16(make_model: MakeModel, open_served: OpenServed) -> None:
    """In 16 bits a blend is as far from vLLM's own answer at ratio 1.0 as rounding goes."""
    with open_served(make_model("llama", torch.bfloat16), dtype="bfloat16") as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend.integrations.vllm.scheduler.LARGEST_SHARE", 9.0)
        served.precompute(*([chunk] for chunk in CHUNKS))
        tokens, spans = prompt(2, 0, 1)
        exact = first_logprobs(served.ask(tokens))
        served.llm.reset_prefix_cache()
        whole = served.ask(tokens, spans, ratio=1.0)
        assert whole.kv_transfer_params["cacheblend"]["hits"] == 3
        assert float((first_logprobs(whole) - exact).abs().max()) < 0.3


def test_misses_are_computed_afterwards(make_model: MakeModel, open_served: OpenServed) -> None:
    """The first request over unknown chunks is vLLM's own; the engine then stores their KV, and the next one is blended."""
    with open_served(make_model("llama")) as served:
        tokens, spans = prompt(0, 1, 2)
        first = served.ask(tokens, spans, documents=[0, 0, 1])
        assert first.kv_transfer_params == {"cacheblend": {"blended": False, "reason": "not_stored"}}
        for _ in range(20):
            served.llm.llm_engine.engine_core.get_output()  # steps, as the engine's own loop does while there are misses
        served.connector._worker._store.flush()
        second = served.ask(tokens, spans, documents=[0, 0, 1]).kv_transfer_params["cacheblend"]
        assert (second["blended"], second["hits"]) == (True, 3)
        unlike = served.ask(tokens, spans).kv_transfer_params["cacheblend"]  # the second chunk has another context now
        assert unlike["hits"] == 2


def test_blended_blocks_are_found_again_by_the_same_marks_alone(served: Served) -> None:
    """The same marked prompt has its blended blocks in the prefix cache; other marks, or none, share exact ones alone."""
    served.precompute(*([chunk] for chunk in CHUNKS))
    tokens, spans = prompt(0, 1, 2)
    served.ask(tokens, spans)
    same = served.ask(tokens, spans)
    assert same.num_cached_tokens >= len(tokens) - 64
    other = served.ask(tokens, spans, ratio=0.3)
    assert other.kv_transfer_params["cacheblend"]["hits"] == 3
    assert other.kv_transfer_params["cacheblend"]["recompute_ratio"] == pytest.approx(0.3, abs=0.02)
    exact = served.ask(tokens)
    assert exact.num_cached_tokens == 32  # the block before the first chunk's
    served.llm.reset_prefix_cache()
    assert served.ask(tokens).outputs[0].token_ids == exact.outputs[0].token_ids


def test_a_failed_blend_is_computed_by_vllm(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a blend raises, at whatever layer, the answer is vLLM's own, it says so, and no page stays."""
    served.precompute(*([chunk] for chunk in CHUNKS))
    tokens, spans = prompt(1, 0, 2)
    exact = served.ask(tokens)
    served.llm.reset_prefix_cache()
    free = served.free_blocks()
    runner = served.connector._worker._fusor.runner
    own = runner.run_rows

    def fail(layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer == 2:
            raise RuntimeError("planted")
        return own(layer, *args, **kwargs)

    monkeypatch.setattr(runner, "run_rows", fail)
    failed = served.ask(tokens, spans)
    assert failed.kv_transfer_params["cacheblend"] == {"blended": False, "reason": "failed: RuntimeError"}
    assert failed.outputs[0].token_ids == exact.outputs[0].token_ids
    assert float((first_logprobs(failed) - first_logprobs(exact)).abs().max()) < 1e-3
    assert served.free_blocks() == free


def test_a_damaged_entry_is_a_miss(served: Served) -> None:
    """An entry whose bytes were changed on disk is recomputed in the prompt, and the others are hits."""
    served.precompute(*([chunk] for chunk in CHUNKS))
    worker = served.connector._worker
    worker._store._ram.clear()
    key = worker._keys.key(CHUNKS[1], (), None)
    (path,) = [path for path in Path(served.store).rglob("*") if path.is_file() and str(key) in path.name]
    content = bytearray(path.read_bytes())
    content[-1000] ^= 255
    path.write_bytes(content)
    tokens, spans = prompt(0, 1, 2)
    report = served.ask(tokens, spans).kv_transfer_params["cacheblend"]
    assert (report["blended"], report["hits"]) == (True, 2)


def test_an_aborted_blend_leaves_nothing(served: Served) -> None:
    """A request that is aborted between two layers gives its pages back, and unpins its chunks."""
    from vllm import SamplingParams

    served.precompute(*([chunk] for chunk in CHUNKS))
    tokens, spans = prompt(0, 1, 2)
    engine, free = served.llm.llm_engine, served.free_blocks()
    served.connector._rows = 0  # one layer a step
    extra = {"kv_transfer_params": {"cacheblend": {"chunks": spans}}}
    engine.add_request("to-abort", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=4, extra_args=extra))
    for _ in range(3):
        engine.step()
    worker = served.connector._worker
    assert worker.blending == 1
    engine.abort_request(list(served.scheduler.requests), internal=True)
    for _ in range(3):
        engine.step()
    assert worker.blending == 0
    assert not served.scheduler.requests
    assert served.free_blocks() == free
    assert not worker._store._pins._counts if hasattr(worker._store._pins, "_counts") else True


def test_other_requests_decode_between_the_layers(served: Served) -> None:
    """While a prompt is blended a layer a step, a running request gets its tokens, the same as alone."""
    served.precompute(*([chunk] for chunk in CHUNKS))
    tokens, spans = prompt(2, 1, 0)
    alone, blended = served.ask(tokens[:50], new_tokens=20), served.ask(tokens, spans)
    served.llm.reset_prefix_cache()
    served.connector._rows = 0
    together = served.ask_all([(tokens[:50], None), (tokens, spans)], new_tokens=20)
    assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert list(together[1].outputs[0].token_ids)[:6] == list(blended.outputs[0].token_ids)


def test_models_that_blending_is_wrong_on_are_refused(
    make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a blend is not vLLM's own answer in the check at start-up, the engine does not start, and says why."""
    from cacheblend.integrations.vllm.runner import VllmRunner

    own = VllmRunner.rotate

    def shifted(self: VllmRunner, k_1HSD: torch.Tensor, cos_sin: Any) -> torch.Tensor:
        return own(self, k_1HSD, (cos_sin[0], cos_sin[1] * 0.9))

    monkeypatch.setattr(VllmRunner, "rotate", shifted)
    with pytest.raises(UnsupportedModelError, match="where blending must be exact"), open_served(make_model("llama")):
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding")],
)
def test_what_is_not_supported_is_refused_by_name(
    make_model: MakeModel, open_served: OpenServed, options: dict[str, Any], named: str
) -> None:
    """An engine that is run with something that blending does not work with says what, and does not start."""
    with pytest.raises(UnsupportedModelError, match=named), open_served(make_model("llama"), **options):
        pass
