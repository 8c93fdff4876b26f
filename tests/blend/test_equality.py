"""Where blending must be exact, it is: against the Hugging Face model's own forward on the same ids."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import BOS, assert_full_prefill, chunk, draw_ids, largest_difference, rag_prompt
from tiny_models import CONFIGS, WINDOW, tiny_model

from cacheblend.blend import FusionConfig, Fusor, Segment

pytestmark = pytest.mark.contract


@pytest.fixture(params=sorted(CONFIGS))
def fusor(request: pytest.FixtureRequest) -> Fusor:
    return Fusor(tiny_model(request.param))


def test_ratio_one_is_full_prefill(fusor: Fusor) -> None:
    """At ratio 1.0 logits and every layer's K and V are those of the model's own forward, on every family."""
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(recompute_ratio=1.0))
    assert_full_prefill(fusor, fused)
    assert all(len(positions) == len(fused.token_ids) for positions in fused.recomputed)


def test_chunk_behind_its_own_prefix_needs_no_repair(fusor: Fusor) -> None:
    """At ratio 0 a chunk right after its own prefix has the very bits of a forward of prefix and chunk."""
    segment = chunk(fusor, 33, seed=4)
    reference = fusor.prefill([*BOS, *segment.token_ids])
    fused = fusor.fuse([Segment(BOS), segment, Segment(draw_ids(3, seed=9))], FusionConfig(recompute_ratio=0))
    full_layers = 0
    for layer, (mine, theirs) in enumerate(zip(fused.cache.layers, reference.cache.layers, strict=True)):
        if not theirs.is_sliding:
            full_layers += 1
            assert torch.equal(mine.keys[:, :, 1:34], theirs.keys[:, :, 1:]), layer
            assert torch.equal(mine.values[:, :, 1:34], theirs.values[:, :, 1:]), layer
        else:
            shared = WINDOW - 1 - 3  # the three question tokens pushed as many out of the window
            assert torch.equal(mine.keys[:, :, :shared], theirs.keys[:, :, 3:]), layer
    assert full_layers or fusor.decoder.windows[0] is not None


def test_exact_segments_are_full_prefills_own(fusor: Fusor) -> None:
    """Exact segments (a cached system prompt, then the conversation) are never recomputed; all is full prefill at 1.0."""
    system, turns = [*BOS, *draw_ids(15, seed=10)], draw_ids(14, seed=11)
    segments = [
        Segment(system, fusor.precompute(system), exact=True),
        Segment(turns, fusor.precompute(turns, system), exact=True),
        chunk(fusor, 17, seed=1),
        Segment(draw_ids(7, seed=6)),
    ]
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
    assert_full_prefill(fusor, fused)
    assert all(int(positions[0]) == 30 for positions in (*fused.recomputed, *fused.projected))
    assert fused.exact_tokens == 30


def test_generation_continues_as_the_model_does(fusor: Fusor) -> None:
    """`generate` after a fused prompt gives the tokens of `model.generate` on the prompt, and leaves the cache as it was."""
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(recompute_ratio=1.0))
    prompt = torch.tensor([fused.token_ids])
    plain = fusor.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
    expected = plain[0, prompt.shape[1] :].tolist()
    assert fusor.generate(fused, max_new_tokens=10, do_sample=False) == expected
    assert fusor.generate(fused, max_new_tokens=10, do_sample=False) == expected
    assert fused.cache.get_seq_length() == len(fused.token_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-yarn", "gemma2", "mistral-window"])
def test_half_precision_stays_within_its_rounding(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 and float16 ratio 1.0 stays within what rounding costs the model itself."""
    fusor, exact = Fusor(tiny_model(name, dtype)), Fusor(tiny_model(name))
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(recompute_ratio=1.0))
    reference = fusor.prefill(fused.token_ids).logits
    rounding = float((reference - exact.prefill(fused.token_ids).logits).abs().max())
    assert fused.logits.dtype == torch.float32
    assert float((fused.logits - reference).abs().max()) <= 2 * rounding


@given(
    parts=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["chunk", "hole"])), min_size=1, max_size=6),
    question=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_ratio_one_holds_whatever_the_segments(parts: list[tuple[int, str]], question: int) -> None:
    """Ratio 1.0 equals full prefill whatever the number, order and length of segments."""
    fusor = Fusor(tiny_model("gemma3"), fingerprint="gemma3")
    segments = [
        chunk(fusor, n, seed=i) if kind == "chunk" else Segment(draw_ids(n, seed=i)) for i, (n, kind) in enumerate(parts)
    ]
    fused = fusor.fuse([*segments, Segment(draw_ids(question, seed=99))], FusionConfig(recompute_ratio=1.0))
    assert_full_prefill(fusor, fused)


def test_rows_in_pieces_change_nothing() -> None:
    """A layer that runs its rows a few at a time, as long prompts do, gives what it gives at once."""
    fusor = Fusor(tiny_model("gemma2"))
    segments = rag_prompt(fusor)
    whole = fusor.fuse(segments, FusionConfig(recompute_ratio=0.4))
    fusor.decoder.rows_at_once = 10
    pieces = fusor.fuse(segments, FusionConfig(recompute_ratio=0.4))
    assert float((whole.logits - pieces.logits).abs().max()) <= 1e-5
    assert largest_difference(whole.cache, pieces.cache) <= 1e-5


def test_prompt_that_ends_in_a_chunk() -> None:
    """Without a question the last token of the last chunk still runs, and ratio 1.0 is still full prefill."""
    fusor = Fusor(tiny_model("llama"))
    segments = [Segment(BOS), chunk(fusor, 9, seed=1), chunk(fusor, 12, seed=2)]
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
    assert_full_prefill(fusor, fused)
    reuse = fusor.fuse(segments, FusionConfig(recompute_ratio=0))
    assert [positions.tolist() for positions in reuse.recomputed] == [[0, 21]] * 4
