"""A longrope turns a prompt of any length by the model's factors for that length."""

import pytest
from model_families import tiny_model as family_model
from prompts import draw_ids
from tiny_models import ROPE_BORDER, tiny_model

from cacheblend.base.errors import IncompatibleKVError
from cacheblend.blend import FusionConfig, Fusor, Segment
from cacheblend.blend.generation import SequenceKV

SHORT, LONG = ROPE_BORDER - 3, ROPE_BORDER + 40


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "short_mscale": 1.0, "long_mscale": 2.0}
PHIMOE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ROPE_BORDER, **FACTORS}


@pytest.fixture(params=["phi3", "phimoe"])
def fusor(request: pytest.FixtureRequest) -> Fusor:
    return Fusor(tiny_model("phi3-longrope") if request.param == "phi3" else family_model("phimoe", rope_parameters=PHIMOE))


@pytest.mark.parametrize("tokens", [ROPE_BORDER, ROPE_BORDER + 1, LONG])
def test_ratio_one_is_full_prefill(fusor: Fusor, tokens: int) -> None:
    """Stored chunks blend on both sides of the border; at ratio 1.0, and behind an exact prefix, all is the model's own."""
    ids, full = draw_ids(tokens, 1), fusor.prefill(draw_ids(tokens, 1)).logits
    steps, run = fusor.prefix_steps(draw_ids(tokens, 1)[:-1])
    steps.run()
    stored = Segment(ids[9:40], fusor.precompute(ids[9:40]))
    same_side = [Segment(ids[:-1], run, exact=True), Segment(ids[-1:])]
    for segments in ([Segment(ids[:9]), stored, Segment(ids[40:])], *([] if tokens == ROPE_BORDER + 1 else [same_side])):
        fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
        assert float((fused.logits - full).abs().max()) <= 1e-4


def test_a_prefix_of_the_other_side(fusor: Fusor) -> None:
    """KV that is exact in short prompts is refused in long ones, where its logits would be off."""
    ids = draw_ids(LONG, 1)
    steps, run = fusor.prefix_steps(ids[:SHORT])
    steps.run()
    segments = [Segment(ids[:SHORT], run, exact=True), Segment(ids[SHORT:])]
    with pytest.raises(IncompatibleKVError, match="longrope"):
        fusor.fuse(segments)
    fusor.rope_border = None
    assert float((fusor.fuse(segments).logits - fusor.prefill(ids).logits).abs().max()) > 1e-2


def test_decoding_across_the_border(fusor: Fusor) -> None:
    """A batch of sequences before, at and after the border decodes as the model's forward of all tokens does."""
    prompts = [fusor.fuse([Segment(draw_ids(tokens, tokens))]) for tokens in (30, SHORT, LONG)]
    sequences = [SequenceKV(fused, fusor.decoder.windows) for fused in prompts]
    drawn = [[int(fused.logits.argmax())] for fused in prompts]
    for _ in range(15):
        logits_RV = fusor.decoder.decode([own[-1] for own in drawn], sequences)
        for own, logits_V in zip(drawn, logits_RV, strict=True):
            own.append(int(logits_V.argmax()))
    for fused, own in zip(prompts, drawn, strict=True):
        ids = [*fused.token_ids, *own]
        assert [int(fusor.prefill(ids[:end]).logits.argmax()) for end in range(len(fused.token_ids), len(ids))] == own
