"""Attention of chosen rows, in blocks and compiled, and the compiled rotation: the exact ones to rounding."""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from cacheblend.blend import FusionConfig, FusionResult, Fusor, Segment, attention, compiled_file
from cacheblend.blend.attention import FEATURES, ChunkWindow, RowKernel, Rows, attend, row_kernel

needs_compiler = pytest.mark.skipif(compiled_file.find_compiler() is None, reason="no C compiler")
needs_amx, needs_pairs = (
    pytest.mark.skipif(
        not compiled_file.has_feature(feature) or compiled_file.find_compiler() is None,
        reason=f"no {feature}, or no C compiler",
    )
    for feature in FEATURES
)
DTYPES = [
    pytest.param(torch.float32, marks=needs_compiler, id="float32"),
    pytest.param(torch.bfloat16, marks=needs_amx, id="bfloat16"),
]


def kernel_of(dtype: torch.dtype, head_size: int) -> RowKernel:
    """The kernel of a dtype and head size."""
    kernel = row_kernel(dtype, torch.device("cpu"), head_size)
    assert kernel is not None
    return kernel


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    data=st.data(),
    keys=st.integers(1, 700),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 40),
    head_size=st.sampled_from([32, 64, 96, 128]),
    window=st.none() | st.integers(1, 800) | st.integers(1, 800).map(ChunkWindow),
    softcap=st.none() | st.sampled_from([2.0, 50.0]),
)
@settings(max_examples=150, deadline=None)
def test_equals_attention_in_float32(
    dtype: torch.dtype,
    data: st.DataObject,
    keys: int,
    kv_heads: int,
    groups: int,
    head_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Any rows, heads, window and soft-capping; the last row's weights too."""
    rows_S = torch.tensor(sorted(data.draw(st.sets(st.integers(0, keys - 1), min_size=1, max_size=90))))
    compare(kernel_of(dtype, head_size), dtype, rows_S, keys, (kv_heads, groups, head_size), window, softcap)


def dense(
    q_1QSD: Tensor, k_1HND: Tensor, v_1HND: Tensor, rows_S: Tensor, scaling: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention output (1, S, Q, D) of chosen rows by one dense exact mask in float32, and its weights (1, Q, S, N)."""
    k_1QND, v_1QND = (x.float().repeat_interleave(q_1QSD.shape[1] // x.shape[1], 1) for x in (k_1HND, v_1HND))
    key_N = torch.arange(k_1HND.shape[2])
    hidden_SN = key_N > rows_S[:, None]
    if isinstance(window, ChunkWindow):
        hidden_SN |= key_N // int(window) != rows_S[:, None] // int(window)
    elif window is not None:
        hidden_SN |= key_N <= rows_S[:, None] - window
    scores = q_1QSD.float() @ k_1QND.transpose(2, 3) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(hidden_SN, -torch.inf), -1)
    return (weights @ v_1QND).transpose(1, 2), weights


def compare(
    kernel: RowKernel,
    dtype: torch.dtype,
    rows_S: Tensor,
    keys: int,
    heads: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
) -> None:
    """Compare a kernel with attention in float32, for KV heads, query heads of each, and their size; all three are views.

    What no row may see is not a number.
    """
    (kv_heads, groups, head_size), seen = heads, int(rows_S[-1]) + 1
    generator = torch.Generator().manual_seed(keys)
    q_1QSD = torch.randn(1, len(rows_S), kv_heads * groups, head_size, generator=generator).to(dtype).transpose(1, 2)
    k_1HND, v_1HND = torch.randn(2, 1, kv_heads, keys + 7, head_size, generator=generator).to(dtype)[:, :, :, :keys]
    output, weights = dense(q_1QSD, k_1HND[:, :, :seen], v_1HND[:, :, :seen], rows_S, 0.2, window, softcap)
    k_1HND[:, :, seen:], v_1HND[:, :, seen:] = torch.nan, torch.nan
    sums_2K, first = torch.zeros(2, seen), len(rows_S) // 3
    how = {"scaling": 0.2, "window": window, "softcap": softcap}
    got = kernel.attend(q_1QSD, k_1HND, v_1HND, rows_S, weights_2K=sums_2K, weighed_from=first, **how)
    off = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), output, rtol=off, atol=off)
    for sum_K, rows_QSK in zip(sums_2K, (weights[0, :, first:], weights[0, :, -1:]), strict=True):
        torch.testing.assert_close(sum_K, rows_QSK.sum((0, 1)), rtol=off, atol=off / 200 * rows_QSK[..., 0].numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_is_no_number_stays_so(dtype: torch.dtype, softcap: float | None) -> None:
    """A row that sees a key with a number that is none has no output, as in the blocks; the row before it has one."""
    q_1QSD, k_1HND, v_1HND = torch.ones(1, 2, 2, 32, dtype=dtype), *torch.ones(2, 1, 1, 50, 32, dtype=dtype)
    k_1HND[..., 40, 7] = torch.nan
    rows_S = torch.tensor([39, 45])
    out_1SQD = kernel_of(dtype, 32).attend(q_1QSD, k_1HND, v_1HND, rows_S, scaling=0.1, window=None, softcap=softcap)
    assert out_1SQD[0, 0].isfinite().all()
    assert out_1SQD[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("config", [LlamaConfig, Gemma2Config])
def test_blends_as_without(dtype: torch.dtype, config: Any, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blend gives what it gives without the kernel, with windows and soft-capping, and a missing chunk."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    window = {"sliding_window": 50} if config is Gemma2Config else {}
    made = config(**sizes, **heads, **window)
    model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="eager")
    for name, weight in model.named_parameters():  # so that what attention looks at matters
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
            weight.data.mul_(8)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 97, (60,), generator=generator).tolist() for _ in range(4)]

    def blend() -> FusionResult:
        fusor = Fusor(model)
        chunks = [Segment(text, fusor.precompute(text, [1])) for text in texts[:2]]
        between = [Segment(texts[2])] if missing else []
        segments = [Segment([1]), chunks[0], *between, chunks[1], Segment(texts[3])]
        return fusor.fuse(segments, FusionConfig(recompute_ratio=0.3))

    mine = blend()
    for module in ("attention", "layer_passes", "fusion"):
        monkeypatch.setattr(f"cacheblend.blend.{module}.row_kernel", lambda *_: None)
    without = blend()
    assert torch.nn.functional.cosine_similarity(mine.logits, without.logits, dim=0) > 0.99
    chosen, usual = (set(result.recomputed[1].tolist()) & set(range(1, 61)) for result in (mine, without))  # of a chunk
    assert len(chosen & usual) > 0.8 * len(usual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_products", [False, True])
def test_rotates_as_the_model_does(dtype: torch.dtype, rounds_products: bool) -> None:
    """Keys are turned in place to the bit as a model turns them, a part of a head too; what turns otherwise is told apart."""
    generator, kernel = torch.Generator().manual_seed(0), kernel_of(dtype, 64)
    k_1HTD = torch.randn(1, 3, 40, 64, generator=generator).to(dtype)[:, :, 5:33]
    angles_TX = torch.rand(28, 16, generator=generator) * 6
    cos_sin = torch.cat([angles_TX.cos()] * 2, -1)[None].to(dtype), torch.cat([angles_TX.sin()] * 2, -1)[None].to(dtype)

    def halves(k: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        turned, left = k[..., :32], k[..., 32:]
        crossed = torch.cat([-turned[..., 16:], turned[..., :16]], -1)
        if rounds_products:
            return torch.cat([turned * pair[0] + crossed * pair[1], left], -1)
        products = (turned.float() * pair[0].float()).double(), crossed.double() * pair[1].double()  # the second one exact
        return torch.cat([(products[0] + products[1]).float().to(dtype), left], -1)

    def neighbours(k: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return halves(k.flip(-1), pair).flip(-1)

    turn = kernel.rotation_of(halves, cos_sin, k_1HTD)
    assert turn is not None
    assert kernel.rotation_of(neighbours, cos_sin, k_1HTD) is None
    expected = halves(k_1HTD, cos_sin)
    turn(k_1HTD, *cos_sin)
    assert torch.equal(k_1HTD, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_prefixes_have_the_models_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored keys of a prompt at ratio 1.0, those of an exact prefix too, are turned as without the kernel, to the bit."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    fusor = Fusor(AutoModelForCausalLM.from_config(config, dtype=dtype))
    ids = torch.randint(2, 97, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    front = fusor.precompute(ids[:30])

    def keys() -> Tensor:
        layers: Any = fusor.fuse([Segment(ids[:30], front, exact=True), Segment(ids[30:])]).cache
        return torch.stack([layer.keys[:, :, :30] for layer in layers.layers])

    mine = keys()
    monkeypatch.setattr("cacheblend.blend.fusion.row_kernel", lambda *_: None)
    assert torch.equal(mine, keys())


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are of x86")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
@pytest.mark.usefixtures("fresh_cache")
def test_narrower_vectors_serve(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 4 or 8 numbers have the kernel of float32 too, which is compared with attention when it is loaded."""
    if processor == "haswell" and not compiled_file.has_feature("avx2"):
        pytest.skip("the processor has no AVX2")
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in compiled_file.FLAGS]
    monkeypatch.setattr(compiled_file, "FLAGS", flags)
    assert row_kernel(torch.float32, torch.device("cpu"), 96) is not None


@needs_pairs
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("head_size", [32, 64, 96, 256])
def test_pairs_serve_without_amx(head_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In bfloat16 a processor with AVX512-BF16 has a kernel without AMX."""
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: avx512f {FEATURES[1]}\n")
    monkeypatch.setattr(compiled_file, "CPUINFO", tmp_path / "cpuinfo")
    kernel = kernel_of(torch.bfloat16, head_size)
    for keys, kv_heads, groups, window, softcap in ((700, 2, 3, None, None), (333, 1, 40, 100, None), (65, 3, 1, None, 5.0)):
        for rows_S in (torch.arange(0, keys, 7), torch.arange(keys - 20, keys), torch.tensor([keys - 2])):
            compare(kernel, torch.bfloat16, rows_S, keys, (kv_heads, groups, head_size), window, softcap)


@pytest.mark.usefixtures("fresh_cache")
def test_other_models_have_the_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other dtypes and head sizes compile nothing; nor does bfloat16 without instructions for it."""
    assert row_kernel(torch.float16, torch.device("cpu"), 64) is None
    assert row_kernel(torch.float32, torch.device("cpu"), 80) is None
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx512f\n")
    monkeypatch.setattr(compiled_file, "CPUINFO", tmp_path / "cpuinfo")
    assert row_kernel(torch.bfloat16, torch.device("cpu"), 64) is None


@given(
    data=st.data(),
    keys=st.integers(1, 60),
    window=st.none() | st.integers(1, 70) | st.integers(1, 70).map(ChunkWindow),
    softcap=st.none() | st.just(2.0),
    block=st.integers(1, 9),
    run=st.integers(1, 9),
    gap=st.integers(1, 20),
    kept=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None)
def test_blocks_equal_the_dense_mask(
    data: st.DataObject,
    keys: int,
    window: int | None,
    softcap: float | None,
    block: int,
    run: int,
    gap: int,
    kept: bool,
    dtype: torch.dtype,
) -> None:
    """Any rows, window, soft-capping, block size and cuts between blocks give what one dense exact mask gives.

    So does the next layer of the same rows, whose window may be another, with the masks kept or made anew. In bfloat16 what is
    rounded on the way (scores and weights, 8 bits each) shows.
    """
    scattered = st.sets(st.integers(0, keys - 1), min_size=1)
    to_the_end = st.integers(0, keys // 4).map(lambda first: set(range(first, keys)))
    rows = torch.tensor(sorted(data.draw(scattered | to_the_end)))
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, heads, n, 8, generator=generator).to(dtype) for heads, n in ((4, len(rows)), (2, keys), (2, keys))
    )
    atol = 1e-5 if dtype == torch.float32 else 5e-2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_ROWS, "cpu", block)
        patch.setattr(attention, "LONG_RUN", run)
        patch.setattr(attention, "LONG_GAP", gap)
        patch.setattr(attention, "MAX_CACHED_MASK_BYTES", 2**20 if kept else 0)
        same_rows = Rows.of(rows, torch.device("cpu"))
        for seen in (window, None, window):
            mine = attend(q, k, v, same_rows, scaling=0.3, window=seen, softcap=softcap)
            exact, _ = dense(q, k, v, rows, 0.3, seen, softcap)
            assert mine.dtype == dtype
            assert torch.allclose(mine.float(), exact, atol=atol)


def test_keys_behind_the_last_row_are_not_read() -> None:
    """Keys that no row of a block can see may hold anything, NaN included."""
    rows = torch.tensor([3, 5, 11, 12])
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.nan
    assert torch.isfinite(attend(q, k, v, Rows.of(rows, torch.device("cpu")), scaling=1.0)).all()


def test_blocks_end_at_long_runs_and_gaps() -> None:
    """A missing chunk's rows stand in blocks of their own, larger ones; a few lone rows far ahead do not share one."""
    rows = torch.cat([torch.arange(0, 90, 3), torch.arange(100, 612), torch.arange(620, 700, 4), torch.arange(2000, 2010)])
    blocks = [block.positions_S for block in Rows.of(rows, torch.device("cpu")).blocks()]
    assert torch.equal(torch.cat(blocks), rows)
    assert [(int(block[0]), len(block)) for block in blocks] == [(0, 30), (100, 256), (356, 256), (620, 20), (2000, 10)]
