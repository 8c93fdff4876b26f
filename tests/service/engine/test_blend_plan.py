"""The plan of a blend, by a table of what was found and how the ratio is chosen."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cacheblend.loader import LoadingPlan
from cacheblend.service.engine.blend_plan import BlendPolicy, BlendSegment, fresh_records, plan_blend
from cacheblend.service.engine.prompt import PromptChunk, PromptTokens
from cacheblend.store import ChunkKey

PREFIX, ONE, BETWEEN, TWO, SUFFIX = (1, 2, 3), (10, 11), (20,), (30, 31, 32), (40, 41)
R_STAR = 0.15


@dataclass
class StoredKV:
    """Stored KV, as far as a plan reads it."""

    token_ids: tuple[int, ...]
    tier: str = "nvme"
    num_layers: int = 4
    rotated: bool = False

    def layer_bytes(self, layer: int) -> int:
        """Ten bytes a token and layer, and the layer's number."""
        return 10 * len(self.token_ids) + layer


@dataclass
class FixedController:
    """A controller with one answer; notes what it was asked."""

    ratio: float
    full: bool
    asked: list[Any] = field(default_factory=list)

    def plan(self, **arguments: Any) -> LoadingPlan:
        """The answer."""
        self.asked.append(arguments)
        return LoadingPlan(
            ratio=self.ratio,
            load_s=1.0,
            load_s_by_tier={},
            recompute_s=1.0,
            prefill_s=1.0,
            full_s=2.0,
            full_recompute=self.full,
        )


@dataclass
class FixedWork:
    """An estimate of the work that finds each prompt short, or none."""

    short: bool

    def is_short(self, *_: float) -> bool:
        """The answer."""
        return self.short


def chunk(token_ids: tuple[int, ...]) -> PromptChunk:
    """A chunk that may be stored."""
    key = ChunkKey.of(token_ids, prefix_ids=PREFIX, model="model", codec="raw")
    return PromptChunk(token_ids, key, earlier=((7, 8),))


CHUNKS = (chunk(ONE), PromptChunk(BETWEEN), chunk(TWO))
PROMPT = PromptTokens(PREFIX, SUFFIX, CHUNKS)
HELD = BlendSegment(PREFIX, StoredKV(PREFIX, "memory"), exact=True)  # type: ignore[arg-type]  # a fake


def policy_of(ratio: float | None = None, **choosers: Any) -> BlendPolicy:
    """A policy of a model of four layers."""
    return BlendPolicy(ratio=ratio, quality_ratio=R_STAR, **choosers)


def found_of(*stored: tuple[int, ...], prefix: BlendSegment | None = None) -> tuple[BlendSegment | None, list[Any]]:
    """Stored KV of those chunks that are named."""
    kvs: list[Any] = [StoredKV(one.token_ids) if one.token_ids in stored else None for one in CHUNKS]
    return prefix, kvs


@pytest.mark.parametrize(
    ("stored", "prefix", "kinds", "misses", "exact_tokens"),
    [
        ((), None, ["fresh", "fresh", "fresh", "fresh", "fresh"], [ONE, TWO], None),
        ((ONE, TWO), None, ["fresh", "reused", "fresh", "reused", "fresh"], [], 3),
        ((ONE, TWO), HELD, ["exact", "reused", "fresh", "reused", "fresh"], [], 3),
        ((TWO,), HELD, ["exact", "fresh", "fresh", "reused", "fresh"], [ONE], 6),
        ((), HELD, ["exact", "fresh", "fresh", "fresh", "fresh"], [ONE, TWO], None),
    ],
)
def test_segments(
    stored: tuple[tuple[int, ...], ...],
    prefix: BlendSegment | None,
    kinds: list[str],
    misses: list[tuple[int, ...]],
    exact_tokens: int | None,
) -> None:
    """Stored chunks are reused, all else is computed; text between chunks is never a miss, and the tokens are the prompt's."""
    plan = plan_blend(PROMPT, *found_of(*stored, prefix=prefix), policy_of(0.3))
    records = [segment.record for segment in plan.segments]
    assert [record.kind for record in records] == kinds
    assert tuple(token for segment in plan.segments for token in segment.token_ids) == PROMPT.token_ids
    assert [one.token_ids for one in plan.misses] == misses
    assert plan.exact_tokens == exact_tokens
    assert (plan.ratio, plan.full_recompute, plan.predicted) == (0.3, False, None)
    keys = [record.key for record in records]
    assert keys == [None, str(CHUNKS[0].key), None, str(CHUNKS[2].key), None]
    tiers = {record.token_ids: record.tier for record in records if record.key is not None}
    assert tiers == {one.token_ids: "nvme" if one.token_ids in stored else None for one in CHUNKS if one.key is not None}


@pytest.mark.parametrize(
    ("asked", "choosers", "ratio", "full"),
    [
        (0.3, {"controller": FixedController(0.6, full=True), "work": FixedWork(short=True)}, 0.3, False),
        (0.0, {}, 0.0, False),
        (None, {}, R_STAR, False),
        (None, {"work": FixedWork(short=False)}, R_STAR, False),
        (None, {"work": FixedWork(short=True)}, R_STAR, True),
        (None, {"controller": FixedController(0.6, full=False), "work": FixedWork(short=True)}, 0.6, False),
        (None, {"controller": FixedController(0.6, full=True)}, 0.6, True),
        # One token stands between the five that are reused; a blend that is as wide already is not widened.
        (0.2, {"widens": True}, 0.1, False),
        (0.3, {"widens": True}, 0.3, False),
        (1.0, {"widens": True}, 1.0, False),
    ],
)
def test_who_chooses_the_ratio(asked: float | None, choosers: dict[str, Any], ratio: float, full: bool) -> None:
    """The request's ratio comes first, then the controller's, then r*; a first round counts what stands between chunks."""
    plan = plan_blend(PROMPT, *found_of(ONE, TWO, prefix=HELD), policy_of(asked, **choosers))
    assert (plan.ratio, plan.full_recompute) == (ratio, full)
    assert (plan.predicted is not None) == (asked is None and "controller" in choosers)


def test_full_recompute_reads_nothing() -> None:
    """A full recompute uses neither prefix nor chunks; what is stored is neither hit nor miss, what is missing is a miss."""
    plan = plan_blend(PROMPT, *found_of(ONE, prefix=HELD), policy_of(work=FixedWork(short=True)))
    assert all(segment.kv is None for segment in plan.segments)
    records = [segment.record for segment in plan.segments]
    assert {record.kind for record in records} == {"fresh"}
    assert [record.key for record in records if record.key is not None] == [str(CHUNKS[2].key)]
    assert [one.token_ids for one in plan.misses] == [TWO]
    assert plan.exact_tokens is None


def test_what_the_controller_is_asked() -> None:
    """It gets the reads of the last layer, and the tokens that are reusable, fresh and exact."""
    controller = FixedController(0.2, full=False)
    found = found_of(ONE, TWO, prefix=HELD)
    plan_blend(PROMPT, *found, policy_of(controller=controller))
    assert controller.asked == [{"reads": [("nvme", 23), ("nvme", 33)], "reusable": 5, "fresh": 3, "exact": 3}]


def test_a_prefix_that_reaches_into_the_suffix() -> None:
    """Without chunks a cached prefix may hold a part of the question; what is after it is computed."""
    ids = (*PREFIX, *SUFFIX[:1])
    run = BlendSegment(ids, StoredKV(ids, "memory"), exact=True)  # type: ignore[arg-type]  # a fake
    plan = plan_blend(PromptTokens(PREFIX, SUFFIX), run, [], policy_of())
    assert [segment.token_ids for segment in plan.segments] == [ids, SUFFIX[1:]]


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (0, [PREFIX, ONE, BETWEEN, TWO, SUFFIX]),
        (3, [ONE, BETWEEN, TWO, SUFFIX]),
        (4, [ONE[1:], BETWEEN, TWO, SUFFIX]),
        (10, [SUFFIX[1:]]),
    ],
)
def test_fresh_records(tokens: int, parts: list[tuple[int, ...]]) -> None:
    """What stands after the first tokens is recorded part by part."""
    assert [record.token_ids for record in fresh_records(PROMPT, tokens)] == parts


FORM, PROSE = tuple(range(50, 60)), tuple(range(100, 130))


@pytest.mark.parametrize(
    ("texts", "computed"),
    [
        ([(*FORM, 1, 2, 3), (*FORM, 4, 5, 6), (7, *FORM, 8)], [True, True, True]),
        ([(*FORM, 1), PROSE, (*FORM, 2), (3, *FORM)], [True, False, True, True]),
        ([(*FORM, 1), (*FORM, 2)], [True, True]),
        ([(*FORM, *range(8)), (*FORM, *range(10, 18)), (*FORM, *range(60, 68))], [False, False, False]),
        ([(*FORM, 1), (*FORM, 1), PROSE], [False, False, False]),  # a passage that stands twice
    ],
)
@pytest.mark.parametrize(("ratio", "choosers"), [(None, {}), (0.05, {"widens": True}), (0.05, {})])
def test_chunks_that_look_alike(
    texts: list[tuple[int, ...]], computed: list[bool], ratio: float | None, choosers: dict[str, Any]
) -> None:
    """Records of one form are computed, and are neither hits nor misses; all others are reused, and all at a ratio by name."""
    found: list[Any] = [StoredKV(text) for text in texts]
    plan = plan_blend(PromptTokens(PREFIX, SUFFIX, tuple(map(chunk, texts))), None, found, policy_of(ratio, **choosers))
    is_named = ratio is not None and not choosers
    kinds = ["fresh" if one and not is_named else "reused" for one in computed]
    assert [segment.record.kind for segment in plan.segments] == ["fresh", *kinds, "fresh"]
    assert (plan.misses, plan.look_alike) == ((), 0 if is_named else sum(computed))


def test_one_passage_at_two_places() -> None:
    """A passage whose first tokens are cut at one place is equal to the one at the other place, and does not look alike."""
    chunks = tuple(replace(chunk(PROSE), token_ids=PROSE[cut:], stored_ids=PROSE, start=cut) for cut in (1, 2))
    found: list[Any] = [StoredKV(one.token_ids) for one in chunks]
    assert plan_blend(PromptTokens(PREFIX, SUFFIX, chunks), None, found, policy_of(None)).look_alike == 0
