"""Blending inside a running vLLM: what it answers, what its prefix cache holds afterwards, what becomes of failures."""

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes import FakeEmbedder
from profiles import linear_profile
from vllm_engines import FAMILIES, VOCAB, MakeModel, OpenServed, Served, apart, first_logprobs

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import FusionConfig, Fusor, Segment
from cacheblend.blend.loading import choose_dtype, load_tokenizer
from cacheblend.integrations.vllm.config import ConnectorConfig
from cacheblend.integrations.vllm.plugin import VARIABLES
from cacheblend.integrations.vllm.router import CHAT, PromptMarker
from cacheblend.loader import describe_device, write_profile
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.store import KVStore, StoreConfig

pytestmark = pytest.mark.contract

DRAW = random.Random(5)
HEAD = [DRAW.randrange(2, VOCAB) for _ in range(40)]
CHUNKS = [[DRAW.randrange(2, VOCAB) for _ in range(size)] for size in (70, 66, 72)]
QUESTION = [DRAW.randrange(2, VOCAB) for _ in range(9)]
MIXED_REQUESTS = int(os.environ.get("MIXED_REQUESTS", "60"))  # CI's; by hand as many as one likes


@pytest.fixture
def served(make_model: MakeModel, open_served: OpenServed) -> Iterator[Served]:
    """An engine that has stored the chunks' KV."""
    with open_served(make_model("llama")) as served:
        served.precompute(CHUNKS)
        yield served


def prompt(
    *order: int, head: Sequence[int] = HEAD, chunks: Sequence[Sequence[int]] = CHUNKS
) -> tuple[list[int], list[list[int]]]:
    """The prompt over chunks in an order, and where they stand."""
    tokens, spans = list(head), list[list[int]]()
    for index in order:
        spans.append([len(tokens), len(tokens) + len(chunks[index])])
        tokens += chunks[index]
    return [*tokens, *QUESTION], spans


def own_logits(fusor: Fusor, served: Served, order: tuple[int, ...], config: FusionConfig) -> torch.Tensor:
    """Log probabilities that the project's own fusor gives, over the very entries that vLLM's worker has stored."""
    keys = served.scheduler.connector._scheduler._naming
    assert keys.model == fusor.fingerprint
    with KVStore(StoreConfig(directory=served.store / "kv")) as store:
        kvs = [store.get(keys.key(CHUNKS[index], ())) for index in order]
    assert None not in kvs
    chunks = [Segment(CHUNKS[index], kv) for index, kv in zip(order, kvs, strict=True)]
    fused = fusor.fuse([Segment(HEAD), *chunks, Segment(QUESTION)], config)
    return torch.log_softmax(fused.logits, dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_blends_are_the_projects_own(name: str, make_model: MakeModel, open_served: OpenServed) -> None:
    """At ratio 1.0 an answer is vLLM's own; at a lower one it is that of the project's fusor on the same entries; and the exact
    prompt afterwards finds nothing of it in the prefix cache.
    """
    folder = make_model(name)
    fusor = Fusor.from_pretrained(str(folder))
    with open_served(folder) as served:
        served.precompute(CHUNKS)
        for order in ((0, 1, 2), (2, 0, 1)):
            tokens, spans = prompt(*order)
            exact = served.ask(tokens)
            served.llm.reset_prefix_cache()
            whole = served.ask(tokens, spans, ratio=1.0)
            assert whole.kv_transfer_params["cacheblend"]["hits"] == 3, whole.kv_transfer_params
            assert whole.outputs[0].token_ids == exact.outputs[0].token_ids
            assert apart(whole, exact) < 1e-3
            blended = served.ask(tokens, spans)
            own = own_logits(fusor, served, order, FusionConfig(recompute_ratio=0.15))
            assert float((first_logprobs(blended) - own).abs().max()) < 1e-3
            if name != "mistral-window":  # whose windows of 12 do not reach from the question to a chunk's beginning
                assert apart(blended, exact) > 1e-3
            again = served.ask(tokens)
            assert again.num_cached_tokens <= len(HEAD)
            assert apart(again, exact) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16(name: str, make_model: MakeModel, open_served: OpenServed) -> None:
    """In 16 bits an answer at ratio 1.0 is vLLM's own, after short openings and long ones, which are held.

    It is so to the bit where the processor multiplies bfloat16; elsewhere its products depend on the number of rows.
    """
    rounding = 0 if choose_dtype(torch.bfloat16, "cpu") is torch.bfloat16 else 0.02
    with open_served(make_model(name, torch.bfloat16), dtype="bfloat16") as served:
        served.precompute(CHUNKS)
        for head in (HEAD, HEAD * 2):
            tokens, spans = prompt(2, 0, head=head)
            exact = served.ask(tokens)
            served.llm.reset_prefix_cache()
            whole = served.ask(tokens, spans, ratio=1.0)
            assert whole.kv_transfer_params["cacheblend"]["hits"] == 2
            assert apart(whole, exact) <= rounding
            assert rounding or whole.outputs[0].token_ids == exact.outputs[0].token_ids


def test_misses_are_computed_afterwards(make_model: MakeModel, open_served: OpenServed) -> None:
    """The first request over unknown chunks is vLLM's own; the engine then stores their KV, and the next one is blended."""
    with open_served(make_model("llama")) as served:
        tokens, spans = prompt(0, 1, 2)
        first = served.ask(tokens, spans, documents=[0, 0, 1])
        assert first.kv_transfer_params == {"cacheblend": {"blended": False, "reason": "not_stored"}}
        for _ in range(20):
            served.llm.llm_engine.engine_core.get_output()  # steps, as the engine's own loop does while there are misses
        served.connector._worker._store.flush()
        served.llm.reset_prefix_cache()
        second = served.ask(tokens, spans, documents=[0, 0, 1]).kv_transfer_params["cacheblend"]
        assert (second["blended"], second["hits"]) == (True, 3)
        unlike = served.ask(tokens, spans).kv_transfer_params["cacheblend"]  # the second chunk has another context now
        assert unlike["hits"] == 2


def test_blended_blocks_are_found_again_by_the_same_marks_alone(served: Served) -> None:
    """The same marked prompt has its blended blocks in the prefix cache; other marks, or none, share exact ones alone."""
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
    served.llm.reset_prefix_cache()
    first, *others = [one.kv_transfer_params["cacheblend"] for one in served.ask_all([(tokens, spans)] * 4)]
    assert (first["hits"], [one["reason"] for one in others]) == (3, 3 * ["prefix_cache"])  # blended once


def test_a_long_opening_is_computed_once(served: Served) -> None:
    """What many prompts begin with is computed for the first of them, and is exact in all; its blocks are vLLM's own."""
    opening = [*HEAD, *reversed(HEAD)]
    for order in ((0, 2), (2, 1, 0)):
        tokens, spans = prompt(*order, head=opening)
        exact = served.ask(tokens)
        served.llm.reset_prefix_cache()
        blended = served.ask(tokens, spans)
        assert blended.kv_transfer_params["cacheblend"]["hits"] == len(order)
        assert blended.num_cached_tokens == len(tokens) - 1
        served.llm.reset_prefix_cache()
        whole = served.ask(tokens, spans, ratio=1.0)
        assert apart(whole, exact) < 1e-3
        again = served.ask(tokens)
        assert again.num_cached_tokens == 64  # the opening's full blocks, which the blend has written
        assert apart(again, exact) < 1e-3
    assert list(served.connector._worker._prefixes) == [("", tuple(opening))]


def test_both_engines_share_a_store(make_model: MakeModel, open_served: OpenServed) -> None:
    """What the project's engine has ingested are hits in vLLM, after the same context; and what vLLM stores has its numbers."""
    folder = make_model("llama")
    documents = [
        {"title": "Travel", "text": "Trains are booked by the office, and a night away is paid. " * 5},
        {"title": "Lunch", "text": "Lunch is at noon in the hall, and it is free on every Friday. " * 2},
    ]
    with open_served(folder) as served:
        fusor = Fusor.from_pretrained(str(folder))
        config = EngineConfig(
            model=str(folder), store_dir=served.store, retriever=RetrieverConfig(chunk_tokens=64), dtype="float32"
        )
        with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
            engine.ingest(documents)
        options = ConnectorConfig.from_options({"store_dir": str(served.store), "chunk_tokens": 64})
        naming = served.connector._worker._naming
        with closing(PromptMarker(load_tokenizer(str(folder)), options, 512, naming, Mock())) as marker:
            marked = marker.mark(CHAT, {"messages": [{"role": "user", "content": "When is lunch?"}], "documents": documents})
        assert marked is not None
        params = marked["kv_transfer_params"]
        tokens, marks = params["prompt_token_ids"], params["cacheblend"]
        assert len(marks["chunks"]) > 2
        answer = served.ask(tokens, marks["chunks"], documents=marks["documents"], ratio=0.14)
        report = answer.kv_transfer_params["cacheblend"]
        assert (report["blended"], report["hits"]) == (True, len(marks["chunks"])), report
        served.precompute(CHUNKS)
        keys, worker = served.connector._worker._naming, served.connector._worker
        own = fusor.precompute_documents([([chunk], [0]) for chunk in CHUNKS], keys.prefix_ids, keys.context)
        for chunk, kv in zip(CHUNKS, own, strict=True):
            stored = worker._store.get(keys.key(chunk, ()))
            for mine, other in zip(kv.layers, stored.layers, strict=True):
                assert all(float((x - y).abs().max()) < 1e-4 for x, y in zip(mine, other, strict=True))


@pytest.mark.parametrize("name", ["mistral-window", "gemma2"])
def test_rows_by_vllms_own_kernel(name: str, make_model: MakeModel, open_served: OpenServed) -> None:
    """Neighbouring rows by vLLM's CPU kernel are those by PyTorch's, with windows and soft-capping."""
    with open_served(make_model(name)) as served:
        served.precompute(CHUNKS)
        runner = served.connector._worker._fusor.runner
        kernel, answers = runner.cpu_attention, []
        assert kernel is not None
        tokens, spans = prompt(2, 0, 1)
        for way in (kernel, None):
            runner.cpu_attention = way
            served.llm.reset_prefix_cache()
            answers.append(served.ask(tokens, spans, ratio=1.0))
        assert apart(*answers) < 1e-3


def test_the_loading_controller_picks_the_ratio(make_model: MakeModel, open_served: OpenServed, tmp_path: Path) -> None:
    """With a profile beside the store, a request that names no ratio gets the one that hides behind loading, others their own;
    one whose KV would come later than it is computed is left to vLLM.
    """
    folder = make_model("llama")
    shape: dict[str, Any] = {"layers": 4, "model": Fusor.from_pretrained(str(folder)).fingerprint}
    shape |= {"device": describe_device(torch.device("cpu")), "layer_token_bytes": 2 * 2 * 32 * 4}
    profiles = EngineConfig(model="any", store_dir=tmp_path / "store").profile_dir
    tokens, spans = prompt(0, 1, 2)
    for prefill_factor, blended in ((10, True), (1, False)):
        profile = linear_profile(bytes_per_s=2e7, **shape)
        slower = tuple(replace(sample, seconds=sample.seconds * prefill_factor) for sample in profile.prefill)
        write_profile(profiles, replace(profile, prefill=slower))
        with open_served(folder, connector={"ram_budget_bytes": 1}) as served:
            served.precompute(CHUNKS)
            report = served.ask(tokens, spans).kv_transfer_params["cacheblend"]
            assert report["blended"] == blended, report
            if blended:
                assert report["recompute_ratio"] > 0.2
                named = served.ask(tokens, spans, ratio=0.15).kv_transfer_params["cacheblend"]
                assert named["recompute_ratio"] == pytest.approx(0.15, abs=0.02)
            else:
                assert report["reason"] == "slow_loading"


def test_chunks_that_look_alike_are_left_to_vllm(served: Served) -> None:
    """Records of one form are no blend, and one among them that is none is reused; a ratio by name blends all of them."""
    records = [CHUNKS[0][:60] + chunk[60:] for chunk in CHUNKS]
    served.precompute(records)
    for order, ratio, hits in (((0, 1, 2), None, None), ((0, 1, 3, 2), None, 1), ((0, 1, 2), 0.15, 3)):
        tokens, spans = prompt(*order, chunks=[*records, CHUNKS[1]])
        served.llm.reset_prefix_cache()
        report = served.ask(tokens, spans, ratio=ratio).kv_transfer_params["cacheblend"]
        assert (report["blended"], report.get("hits")) == (hits is not None, hits), report
        assert report.get("reason") == ("look_alike" if hits is None else None)


def test_a_failed_blend_is_computed_by_vllm(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a blend raises, at whatever layer, the answer is vLLM's own, it says so, and neither page nor tensor stays."""
    tokens, spans = prompt(1, 0, 2)
    exact = served.ask(tokens)
    served.llm.reset_prefix_cache()
    free = served.free_blocks()
    runner = served.connector._worker._fusor.runner
    monkeypatch.setattr(runner._stubs[2], "_heads", Mock(side_effect=RuntimeError("planted")))
    failed = served.ask(tokens, spans)
    assert failed.kv_transfer_params["cacheblend"] == {"blended": False, "reason": "failed: RuntimeError"}
    assert failed.outputs[0].token_ids == exact.outputs[0].token_ids
    assert apart(failed, exact) < 1e-3
    assert served.free_blocks() == free
    assert [stub.layer_pass for stub in runner._stubs] == [None] * len(runner._stubs)


def test_a_damaged_entry_is_a_miss(make_model: MakeModel, open_served: OpenServed) -> None:
    """An entry whose bytes were changed on disk is recomputed in the prompt, and the others are hits."""
    with open_served(make_model("llama"), connector={"ram_budget_bytes": 1}) as served:
        served.precompute(CHUNKS)
        key = served.connector._worker._naming.key(CHUNKS[1], ())
        (path,) = [path for path in Path(served.store).rglob("*") if path.is_file() and str(key) in path.name]
        content = bytearray(path.read_bytes())
        content[-1000] ^= 255
        path.write_bytes(content)
        tokens, spans = prompt(0, 1, 2)
        report = served.ask(tokens, spans).kv_transfer_params["cacheblend"]
        assert (report["blended"], report["hits"]) == (True, 2)


def test_other_requests_decode_between_the_layers(served: Served) -> None:
    """While a prompt is blended a layer a step, a running request gets its tokens, the same as alone."""
    tokens, spans = prompt(2, 1, 0)
    alone, blended = served.ask(tokens[:50], new_tokens=20), served.ask(tokens, spans)
    served.llm.reset_prefix_cache()
    served.connector._rows = 0
    together = served.ask_all([(tokens[:50], None), (tokens, spans)], new_tokens=20)
    assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert list(together[1].outputs[0].token_ids)[:6] == list(blended.outputs[0].token_ids)


def test_two_ranks_blend_as_one(make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the heads in each of two processes, answers are those of the project's fusor; both widen, or none does."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    folder = make_model("llama")
    widened = FusionConfig(recompute_ratio=0.05, max_loss_nats=1e-9)
    with open_served(folder, connector={"recompute_ratio": 0.05, "max_loss_nats": 1e-9}, tensor_parallel_size=2) as served:
        for chunk in CHUNKS:
            assert served.llm.collective_rpc("cacheblend_precompute", args=([chunk], [0], None)) == [[1, 0, 0], [1, 0, 0]]
        stored = served.scheduler.connector._scheduler._stored
        keys = served.scheduler.connector._scheduler._naming
        deadline = time.monotonic() + 60
        while not all(stored([keys.key(chunk, ()) for chunk in CHUNKS])) and time.monotonic() < deadline:
            time.sleep(0.1)  # one rank writes, in the background
        tokens, spans = prompt(2, 0, 1)
        exact = served.ask(tokens)
        served.llm.reset_prefix_cache()
        whole = served.ask(tokens, spans, ratio=1.0)
        assert whole.kv_transfer_params["cacheblend"]["hits"] == 3
        assert apart(whole, exact) < 1e-3
        fusor = Fusor.from_pretrained(str(folder))
        for ratio, config in ((0.15, FusionConfig(recompute_ratio=0.15)), (None, widened)):
            blended = served.ask(tokens, spans, ratio=ratio)
            report = blended.kv_transfer_params["cacheblend"]
            assert (report["hits"], report["widened"]) == (3, ratio is None)
            own = own_logits(fusor, served, (2, 0, 1), config)
            assert float((first_logprobs(blended) - own).abs().max()) < 1e-3


def test_a_mixed_load_leaves_nothing(make_model: MakeModel, open_served: OpenServed) -> None:
    """Exact and blended prompts in any order, some aborted at any step and some preempted for want of pages: exact answers are
    those of an engine without blending, and no page, pin or request stays.
    """
    from vllm import SamplingParams

    draw = random.Random(11)
    orders = [(0, 1, 2), (2, 1, 0), (1, 2), (2, 0), (0, 2, 1)]
    folder = make_model("llama")
    with open_served(folder, num_gpu_blocks_override=24, max_num_seqs=6) as served:
        engine = served.llm.llm_engine
        free, preempted = served.free_blocks(), set[str]()
        alone = {order: list(served.ask(prompt(*order)[0], new_tokens=40).outputs[0].token_ids) for order in orders}
        served.precompute(CHUNKS)
        served.llm.reset_prefix_cache()
        wanted, done, aborted = dict[str, tuple[int, ...]](), dict[str, Any](), 0

        def step() -> None:
            done.update({output.request_id: output for output in engine.step() if output.finished})
            preempted.update(name for name, request in served.scheduler.requests.items() if request.num_preemptions)

        for number in range(MIXED_REQUESTS):
            order, marked = draw.choice(orders), draw.random() < 0.5
            tokens, spans = prompt(*order)
            ratio = draw.choice([None, 0.05, 0.5, 1.0])
            extra = {"kv_transfer_params": {"cacheblend": {"chunks": spans, "ratio": ratio}}} if marked else {}
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, extra_args=extra)
            name = f"{'marked' if marked else 'exact'}-{number}"
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
            wanted[name] = order
            served.connector._rows = draw.choice([0, 64, 256])
            for _ in range(draw.randrange(12)):
                step()
            if draw.random() < 0.2 and (open_ones := wanted.keys() - done.keys()):
                gone = draw.choice(sorted(open_ones))
                engine.abort_request([gone])
                wanted.pop(gone)
                aborted += 1
        while engine.has_unfinished_requests():
            step()
        for _ in range(3):
            engine.engine_core.get_output()
        assert wanted.keys() <= done.keys()
        assert aborted > MIXED_REQUESTS // 20
        assert preempted
        blended = 0
        for name, order in wanted.items():
            if name.startswith("exact"):
                assert list(done[name].outputs[0].token_ids) == alone[order], name
                assert done[name].kv_transfer_params is None
            else:
                blended += bool(done[name].kv_transfer_params["cacheblend"]["blended"])
                assert len(done[name].outputs[0].token_ids) == 40
        assert blended > MIXED_REQUESTS // 8
        assert served.scheduler.connector._scheduler._marked == {}
        assert served.scheduler.connector._scheduler._reports == {}
        worker = served.connector._worker
        assert (worker.blending, worker.waiting_misses) == (0, 0)
        assert not served.scheduler.requests
        assert served.free_blocks() == free


def test_models_that_blending_is_wrong_on_are_refused(
    make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a blend is not vLLM's own answer in the check at start-up, the engine does not start, and says why."""
    from cacheblend.integrations.vllm.runner import VllmRunner

    own = VllmRunner.rotate

    def shifted(self: VllmRunner, layer: int, k_1HSD: torch.Tensor, cos_sin: Any, **options: Any) -> torch.Tensor:
        return own(self, layer, k_1HSD, (cos_sin[0], cos_sin[1] * 0.9), **options)

    monkeypatch.setattr(VllmRunner, "rotate", shifted)
    with pytest.raises(UnsupportedModelError, match="which must be exact"), open_served(make_model("llama")):
        pass


def test_the_check_asks_for_no_cuda_graph(
    make_model: MakeModel, open_served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at start-up runs before CUDA graphs are captured, and uses none."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    own = CudagraphDispatcher.dispatch

    def dispatch(self: CudagraphDispatcher, *args: Any, **kwargs: Any) -> Any:
        if self.keys_initialized:
            raise RuntimeError("CUDA graph capturing detected at an inappropriate time")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(CudagraphDispatcher, "dispatch", dispatch)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with open_served(make_model("llama")) as served:
        assert served.llm.llm_engine.engine_core is not None
        assert {name: os.environ[name] for name in VARIABLES} == VARIABLES


def test_what_is_not_supported_is_refused_by_name(make_model: MakeModel, open_served: OpenServed) -> None:
    """An engine that is run with something that blending does not work with says what, and does not start."""
    drafts: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    for why, options in {"speculative decoding": drafts, "kv-offloading-size": {"kv_offloading_size": 1.0}}.items():
        with pytest.raises(UnsupportedModelError, match=why), open_served(make_model("llama"), **options):
            pass
    for name in [name for name in sys.modules if name.startswith("llvmlite")]:  # vLLM's next engine stumbles over its objects
        del sys.modules[name]
