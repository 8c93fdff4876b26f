"""Which requests are blended, and what their blocks are called; vLLM itself is not needed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import ChunkContext, KVGeometry
from cacheblend.integrations.vllm.config import ConnectorConfig
from cacheblend.integrations.vllm.scheduler import BlendScheduler, Marks
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.config import EngineConfig, remember_settings
from cacheblend.store import ChunkKey, StoreConfig

BLOCK = 4
KEYS = ChunkNaming((1, 2), ChunkContext(filler_ids=(3,), document_tokens=100), "model", "raw")
TOKENS = list(range(100, 180))  # two chunks of 32 between 5 and 11 others
CHUNKS = [[5, 37], [37, 69]]


class _Request(SimpleNamespace):
    """vLLM's request, as far as the connector reads it: blocks are hashed one after the other."""

    def __init__(self, params: Any, tokens: list[int] = TOKENS) -> None:
        super().__init__(request_id="one", kv_transfer_params=params, prompt_token_ids=tokens, num_prompt_tokens=len(tokens))
        vars(self).update(mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False, resumable=False, cache_salt=None)
        vars(self).update(block_hashes=[], _block_hasher=object())
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for start in range(len(self.block_hashes) * BLOCK, len(self.prompt_token_ids) - BLOCK + 1, BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else b""
            block = bytes(self.prompt_token_ids[start : start + BLOCK])
            self.block_hashes.append(hashlib.sha256(before + block).digest())


def _scheduler(stored: Callable[[ChunkKey], bool] = bool, prefix_tokens: int = 100, cached: int = 0) -> BlendScheduler:
    return BlendScheduler(KEYS, lambda keys: list(map(stored, keys)), lambda _: cached, 0.1, BLOCK, prefix_tokens)


def _arrived(request: _Request, **options: Any) -> BlendScheduler:
    scheduler = _scheduler(**options)
    scheduler.arrive(request)
    return scheduler


def _marked(**more: Any) -> dict[str, Any]:
    return {"cacheblend": {"chunks": CHUNKS, **more}}


def test_blocks_from_the_first_chunk_on_get_names_of_their_own() -> None:
    """Blocks before the first chunk keep their exact names; all others differ, by ratio and borders too."""
    exact = _Request(None)
    names = set[bytes]()
    for params in (_marked(), _marked(ratio=0.5), {"cacheblend": {"chunks": [[5, 36], [37, 69]]}}):
        request = _Request(params)
        _arrived(request)
        assert request.block_hashes[:1] == exact.block_hashes[:1]
        assert len(request.block_hashes) == len(exact.block_hashes)
        assert not set(request.block_hashes[1:]) & set(exact.block_hashes)
        assert not set(request.block_hashes[1:]) & names
        names |= set(request.block_hashes[1:])
    again = _Request(_marked())
    _arrived(again)
    assert set(again.block_hashes[1:]) <= names


def test_a_prompt_is_handed_over_but_for_its_last_token() -> None:
    """Of a marked prompt all tokens but the last come from a worker, whatever of it is in the prefix cache."""
    scheduler = _arrived(request := _Request(_marked()))
    assert scheduler.matched(request, 4) == 75
    scheduler.allocated(request, list(range(20)), 75)
    (job,), missed = scheduler.take_jobs()
    assert (job.start, job.ratio, missed) == (4, None, [])
    assert job.prompt.token_ids == tuple(TOKENS)
    assert [chunk.token_ids for chunk in job.prompt.chunks] == [tuple(TOKENS[start:stop]) for start, stop in CHUNKS]
    assert scheduler.take_jobs() == ([], [])


def test_when_vllm_computes_a_marked_prompt() -> None:
    """A prompt is left to vLLM if a blend would run as many rows; after a failed blend it stays so, under exact block names."""
    scheduler = _arrived(request := _Request(_marked()))
    assert scheduler.matched(request, 60) == 0
    scheduler = _arrived(request := _Request(_marked()))
    for report in ({"blended": True}, {"blended": True}, {"blended": False, "reason": "look_alike"}):
        scheduler.allocated(request, [1], scheduler.matched(request, 0))
        scheduler.observe({"one": report}, 0)
    assert scheduler.matched(request, 0) == 0
    assert request.block_hashes == _Request(None).block_hashes
    assert (scheduler.take_counts(), scheduler.finish(request)) == ({"blended": 1}, {"cacheblend": {"blended": True}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
        ({"kv_transfer_params": {"cacheblend": {"chunks": [[9, 3]]}}}, "marks"),
        ({"kv_transfer_params": {"cacheblend": {"chunks": []}}}, "no_chunks"),
        ({"kv_transfer_params": {"cacheblend": {"chunks": CHUNKS, "ratio": 1.0}}}, "not_worth_it"),
        ({"block_hashes": []}, "short_prompt"),
        ({}, "prefix_cache"),  # which has the larger part of the last chunk
        ({}, "failed"),  # the store cannot be read
    ],
)
def test_requests_that_are_left_to_vllm(change: dict[str, Any], reason: str) -> None:
    """What cannot be blended keeps its exact names, is counted, and its answer says why."""
    request = _Request(_marked())
    for name, value in change.items():
        setattr(request, name, value)
    before = list(request.block_hashes)
    cached = 56 if reason == "prefix_cache" else 0
    scheduler = _arrived(request, cached=cached, stored=(lambda _: 1 / 0) if reason == "failed" else lambda _: True)
    assert scheduler.matched(request, 0) == 0
    assert request.block_hashes == before
    assert scheduler.take_counts() == {f"exact:{reason}": 1}
    answer = scheduler.finish(request)
    assert answer is not None
    assert (answer["cacheblend"]["blended"], answer["cacheblend"]["reason"].partition(":")[0]) == (False, reason)


def test_missed_chunks_keep_the_engine_stepping_until_they_are_stored() -> None:
    """A prompt whose chunks are not stored is exact; its chunks are computed afterwards, at idle steps."""
    scheduler = _arrived(request := _Request(_marked(documents=[7, 7])), stored=lambda _: False)
    assert scheduler.matched(request, 0) == 0
    assert scheduler.has_misses
    _, missed = scheduler.take_jobs()
    assert [chunk.earlier for chunk in missed] == [(), (tuple(TOKENS[5:37]),)]
    assert scheduler.has_misses
    scheduler.observe({}, 0)
    assert not scheduler.has_misses


@pytest.mark.parametrize(("prefix_tokens", "handed_over"), [(149, 0), (150, 109)])
def test_a_prefix_that_workers_do_not_keep_counts_as_computed(prefix_tokens: int, handed_over: int) -> None:
    """A long prefix that is in vLLM's prefix cache, and in no worker's memory, costs the blend more than vLLM has left."""
    tokens = [7] * 150 + list(range(110))
    request = _Request({"cacheblend": {"chunks": [[150, 250]]}}, tokens)
    scheduler = _arrived(request, prefix_tokens=prefix_tokens)
    assert scheduler.matched(request, 150) == handed_over
    assert (request.block_hashes == _Request(None, tokens).block_hashes) == (not handed_over)


@pytest.mark.parametrize(("cached", "left"), [(20, 0), (24, 1), (52, 1), (56, 2)])
def test_chunks_that_vllm_has_are_left_to_it(cached: int, left: int) -> None:
    """A chunk of which the larger part is in the prefix cache is none; those after it have the names of their documents."""
    marks = Marks(chunks=CHUNKS, documents=[7, 7])
    every, some = (marks.prompt(KEYS, TOKENS, None, tokens) for tokens in (0, cached))
    assert (some.chunks, some.token_ids) == (every.chunks[left:], tuple(TOKENS))


def test_prefixes_have_a_part_of_the_ram_budget() -> None:
    """The store and the kept prefixes of all workers take no more than the RAM budget together."""
    config = ConnectorConfig.from_options({"store_dir": "x", "ram_budget_bytes": 2**30})
    geometry = KVGeometry(32, 4, 128, torch.bfloat16, torch.device("cpu"))
    tokens, token_bytes = config.prefix_tokens(geometry, 2), 32 * geometry.layer_bytes(1)
    assert tokens > 0
    total = 2 * (tokens * token_bytes + config.store_config(2).ram_budget_bytes)
    assert 2**30 - 4 * token_bytes < total <= 2**30


def test_unmarked_requests_are_not_touched() -> None:
    """A request without marks, or with another connector's parameters, is nobody's business."""
    scheduler = _scheduler()
    for params in (None, {}, {"do_remote_prefill": True}):
        request = _Request(params)
        scheduler.arrive(request)
        assert scheduler.matched(request, 0) == 0
        assert scheduler.finish(request) is None
    assert scheduler.take_counts() == {}


def test_a_chunk_may_be_a_part_of_what_is_stored() -> None:
    """Its KV has the stored text's name, a passage's in its own namespace; other tokens and a far longer text are refused."""
    texts = [[[9, *TOKENS[5:37], 9], 1, [[8, 8]], True], [TOKENS[37:69], 0, [], False]]
    request = _Request(_marked(stored=texts))
    scheduler = _arrived(request)
    scheduler.allocated(request, [1], scheduler.matched(request, 0))
    ((job,), _) = scheduler.take_jobs()
    names = [KEYS.key(texts[0][0], ((8, 8),)), KEYS.key(texts[1][0], (), "passages:")]
    assert (job.prompt.keys, job.prompt.token_ids) == (names, tuple(TOKENS))
    assert [(chunk.stored_ids[0], chunk.start) for chunk in job.prompt.chunks] == [(9, 1), (TOKENS[37], 0)]
    for change, said in (([texts[0][0], 0, [], True], "no part"), ([texts[0][0], 1, [[8] * 355], True], "may have")):
        wrong = _Request(_marked(stored=[change, texts[1]]))
        assert said in str(_arrived(wrong).finish(wrong))


def test_tenants_have_keys_of_their_own() -> None:
    """A request's cache salt is in its chunks' keys, and a document's earlier text too."""
    asked = list[ChunkKey]()
    for salt in (None, "tenant"):
        request = _Request(_marked())
        request.cache_salt = salt
        _arrived(request, stored=lambda key: asked.append(key) is None)
    assert len(set(map(str, asked))) == 4
    assert str(KEYS.key((5,), ((4,),))) != str(KEYS.key((5,), ()))


@given(borders=st.lists(st.integers(0, 60), max_size=8, unique=True), ratio=st.none() | st.floats(0, 1))
def test_marks_are_read_as_written(borders: list[int], ratio: float | None) -> None:
    """Marks that fit a prompt are read, and others of the same prompt have another salt."""
    chunks = [list(pair) for pair in zip(sorted(borders)[::2], sorted(borders)[1::2], strict=False)]
    marks = Marks.read({"chunks": chunks, "ratio": ratio}, 60)
    assert (marks.chunks, marks.ratio) == (tuple(map(tuple, chunks)), ratio)
    assert len({marks.salt(0.1, "a", ()), marks.salt(0.2, "a", ()), marks.salt(0.1, "b", ()), marks.salt(0.1, "a", (1,))}) == 4


@pytest.mark.parametrize(
    "params",
    [
        [],
        {"chunk": []},
        {"chunks": [[0, 4], [3, 9]]},
        *({"chunks": [span]} for span in ([4, 4], [0, 61], [-1, 4], ["0", 4], [0, True])),
        {"chunks": [[0, 4]], "ratio": 2},
        {"chunks": [[0, 4]], "ratio": float("nan")},
        {"chunks": [[0, 4]], "documents": [1, 2]},
        {"chunks": [[0, 4]], "stored": [[[1, 2, 3, 4, 5], -1, [], True]]},
        {"chunks": [[0, 4]], "stored": [[[1, "2"], 0, [], True]]},
        {"chunks": [[0, 4]], "stored": [[[1, 2, 3, 4], 0, [], True]] * 2},
    ],
)
def test_bad_marks_are_refused(params: Any) -> None:
    """Marks of another form, or that do not fit the prompt, are refused with a message."""
    with pytest.raises(InputError):
        Marks.read(params, 60)


@pytest.mark.parametrize(
    "options", [{}, {"store_dir": ""}, {"store_dir": "x", "unknown": 1}, {"store_dir": "x", "recompute_ratio": 2}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """An option that is unknown or has a value that is not allowed is refused by name."""
    with pytest.raises(ConfigError):
        ConnectorConfig.from_options(options)


def test_a_store_has_its_settings(tmp_path: Path) -> None:
    """The settings that a folder notes of its KV, and its budget, are defaults, which options replace."""
    store = StoreConfig(nvme_budget_bytes=2**40)
    noted = EngineConfig(model="m", store_dir=tmp_path, kv_cache_dtype="int8", context_document_tokens=7, store=store)
    remember_settings(noted)
    for options, codec in (({}, "int8"), ({"codec": "int4"}, "int4")):
        config = ConnectorConfig.from_options({"store_dir": str(tmp_path), **options}).engine
        assert (config.kv_cache_dtype, config.context_document_tokens, config.store) == (codec, 7, store)


def test_the_remote_tier_is_an_option_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote tier has its names of elsewhere, an option counts before a variable, and no text shows the password."""
    given = {"store_dir": "x", "remote": "redis://:hidden@cache:6379/0", "remote_timeout_s": 0.5}
    config = ConnectorConfig.from_options(given)
    store = config.store_config()
    assert (store.remote, store.remote_timeout_s) == (given["remote"], 0.5)
    assert "hidden" not in repr(config)
    monkeypatch.setenv("CACHEBLEND_REMOTE", "unix:///run/redis")
    monkeypatch.setenv("CACHEBLEND_REMOTE_SECRET", "a secret of the deployment")
    assert ConnectorConfig.from_options(given).store_config().remote == given["remote"]
    by_variable = ConnectorConfig.from_options({"store_dir": "x"}).store_config()
    assert (by_variable.remote, by_variable.read_secret()) == ("unix:///run/redis", b"a secret of the deployment")
    with pytest.raises(ConfigError, match="remote"):
        ConnectorConfig.from_options({"store_dir": "x", "remote": "http://cache"})


def test_equal_prompts_are_blended_once() -> None:
    """A prompt waits while its blend is under way for another request, as of `n` answers; if that fails it has its own."""
    scheduler = _arrived(first := _Request(_marked()))
    second, other = (_Request(_marked(ratio=ratio)) for ratio in (None, 0.2))
    second.request_id, other.request_id = "two", "three"
    scheduler.arrive(second)
    scheduler.arrive(other)
    scheduler.allocated(first, [1], scheduler.matched(first, 0) or 0)
    assert [scheduler.matched(request, 0) for request in (first, second, other)] == [79, None, 79]
    scheduler.observe({"one": {"blended": True}}, 0)
    assert scheduler.matched(second, 76) == 0
    assert scheduler.finish(second) == {"cacheblend": {"blended": True, "reason": "prefix_cache", "cached_tokens": 76}}
    scheduler.allocated(first, [1], 79)
    scheduler.arrive(second)
    assert scheduler.matched(second, 0) is None
    scheduler.finish(first)
    assert scheduler.matched(second, 0) == 79
