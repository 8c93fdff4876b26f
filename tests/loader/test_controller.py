import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cacheblend.loader import LoaderConfig, LoadEstimator, LoadingController, LoadingPlan, RecomputeEstimator
from cacheblend.store.errors import ConfigError

tokens = st.integers(1, 20_000)
prefill_s = st.floats(1e-5, 1)
layer_bytes = st.fixed_dictionaries({"ram": st.integers(0, 10**8), "nvme": st.integers(0, 10**8)})


def plan(
    loaded: dict[str, int],
    reusable: int,
    fresh: int,
    layers: int = 32,
    per_1000_s: float = 0.01,
    config: LoaderConfig | None = None,
) -> LoadingPlan:
    config = config or LoaderConfig()
    recompute = RecomputeEstimator([(1000, per_1000_s)])
    return LoadingController(config, LoadEstimator(config), recompute).plan(loaded, reusable, fresh, layers)


@given(loaded=layer_bytes, reusable=tokens, fresh=tokens, per_1000_s=prefill_s, r=st.floats(0, 1), cap=st.floats(0, 1))
@settings(deadline=None)
def test_ratio_stays_within_its_bounds(
    loaded: dict[str, int], reusable: int, fresh: int, per_1000_s: float, r: float, cap: float
) -> None:
    """The ratio is never below r*, never above the cap, whatever loading and recompute take."""
    quality, most = sorted((r, cap))
    config = LoaderConfig(quality_ratio=quality, max_ratio=most)
    assert quality <= plan(loaded, reusable, fresh, per_1000_s=per_1000_s, config=config).ratio <= most


def bytes_of(share: float, count: int, per_1000_s: float) -> dict[str, int]:
    """What loads in a share of the prefill of so many tokens."""
    return {"nvme": int(share * count / 1000 * per_1000_s * LoaderConfig().nvme_bytes_per_s)}


@given(share=st.floats(0, 2), reusable=tokens, fresh=tokens, per_1000_s=prefill_s)
@settings(deadline=None)
def test_recompute_hides_behind_loading(share: float, reusable: int, fresh: int, per_1000_s: float) -> None:
    """Where loading takes longer than recompute at r*, the ratio makes both equal, up to 1; elsewhere it is r*."""
    made = plan(bytes_of(share, reusable + fresh, per_1000_s), reusable, fresh, per_1000_s=per_1000_s)
    at_r = RecomputeEstimator([(1000, per_1000_s)]).layer_s(0.15, reusable, fresh)
    if made.load_layer_s <= at_r:
        assert made.ratio == pytest.approx(0.15)
    elif made.load_layer_s < made.prefill_layer_s:
        assert made.recompute_layer_s == pytest.approx(made.load_layer_s, rel=1e-6)
    else:
        assert made.ratio == pytest.approx(1)


@given(
    share=st.floats(0, 2),
    reusable=tokens,
    fresh=tokens,
    layers=st.integers(1, 80),
    per_1000_s=prefill_s,
    cap=st.floats(0.15, 1),
)
@settings(deadline=None)
def test_full_recompute_where_it_is_faster(
    share: float, reusable: int, fresh: int, layers: int, per_1000_s: float, cap: float
) -> None:
    """Full recompute is chosen exactly when blending, layer by layer, is predicted to take longer."""
    loaded = bytes_of(share, reusable + fresh, per_1000_s)
    made = plan(loaded, reusable, fresh, layers, per_1000_s, LoaderConfig(max_ratio=cap))
    blend_s = made.prefill_layer_s + (layers - 1) * max(made.load_layer_s, made.recompute_layer_s)
    full_s = layers * made.prefill_layer_s
    assume(abs(blend_s - full_s) > 1e-9 * full_s)
    assert made.full_recompute == (blend_s > full_s)


@given(fresh=tokens, layers=st.integers(1, 80), per_1000_s=prefill_s)
@settings(deadline=None)
def test_nothing_to_reuse(fresh: int, layers: int, per_1000_s: float) -> None:
    """Without stored KV a request costs a prefill and is not called slower than one, so that its holes are noted."""
    made = plan({}, 0, fresh, layers, per_1000_s)
    assert (made.ratio, made.load_layer_s, made.full_recompute) == (0.15, 0, False)
    assert made.recompute_layer_s == made.prefill_layer_s == pytest.approx(fresh * per_1000_s / 1000)


@given(reusable=tokens, fresh=tokens, layers=st.integers(1, 80))
@settings(deadline=None)
def test_nothing_to_load(reusable: int, fresh: int, layers: int) -> None:
    """KV that takes no time to load is recomputed at r*, and never in full."""
    made = plan({"ram": 0}, reusable, fresh, layers)
    assert (made.ratio, made.load_layer_s, made.full_recompute) == (0.15, 0, False)
    assert made.recompute_layer_s < made.prefill_layer_s


def test_one_layer() -> None:
    """A model of one layer runs it whole either way, so slow loading does not make it recompute in full."""
    assert not plan({"nvme": 10**9}, 100, 10, layers=1).full_recompute
    assert plan({"nvme": 10**9}, 100, 10, layers=2).full_recompute


def test_an_instant_prefill() -> None:
    """A device whose prefill measures as zero gets r*, not a division by zero."""
    made = plan({"nvme": 1000}, 100, 10, per_1000_s=0.0)
    assert (made.ratio, made.full_recompute) == (0.15, True)


def test_the_papers_example() -> None:
    """A slow device raises the ratio to what hides behind it: 3 of 10 ms a layer is 30 % of tokens without fresh ones."""
    config = LoaderConfig(nvme_bytes_per_s=1e9)
    made = plan({"nvme": 3 * 10**6}, reusable=1000, fresh=0, config=config)
    assert (made.ratio, made.load_layer_s, made.prefill_layer_s) == pytest.approx((0.3, 0.003, 0.01))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookahead_layers", 0),
        ("lookahead_layers", 1.5),
        ("lookahead_layers", True),
        ("quality_ratio", -0.1),
        ("quality_ratio", 1.5),
        ("quality_ratio", float("nan")),
        ("max_ratio", 0.1),
        ("max_ratio", 1.01),
        ("ram_bytes_per_s", 0),
        ("nvme_bytes_per_s", -1.0),
        ("nvme_bytes_per_s", float("nan")),
    ],
)
def test_bad_settings(field: str, value: float) -> None:
    """A setting outside its range is refused by name and value."""
    with pytest.raises(ConfigError, match=field) as caught:
        LoaderConfig(**{field: value})
    assert caught.value.value is value
