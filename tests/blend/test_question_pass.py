"""The question over the stored KV: its attention is the model's own, whatever else the prompt holds."""

from typing import Any

import pytest
import torch
from prompts import BOS, chunk, draw_ids
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.blend import FusionConfig, Fusor, Prompt, Segment, SelectionStep
from cacheblend.blend.layer_passes import MAX_QUESTION_TOKENS, question_rows


class Listening:
    """A selector that keeps nothing and remembers what it was told at layer 0."""

    reads_attention = True

    def __init__(self) -> None:
        self.attention_C = torch.empty(0)

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep no candidate."""
        if step.layer == 0:
            self.attention_C = step.attention_C
        return ~step.all()


def heard(fusor: Fusor, segments: list[Segment]) -> torch.Tensor:
    """What a selector is told of the reusable tokens."""
    listening = Listening()
    fusor.fuse(segments, FusionConfig(selector=listening))
    return listening.attention_C


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_it_is_the_model_s_own_attention(name: str) -> None:
    """Over exact KV the attention told is what the model's own eager attention gives."""
    fusor, ids, question = Fusor(tiny_model(name)), draw_ids(30, seed=1), draw_ids(6, seed=2)
    model: Any = fusor.model
    model.set_attn_implementation("eager")
    output = model(torch.tensor([[*BOS, *ids, *question]]), output_attentions=True)
    model.set_attn_implementation("sdpa")
    weights_LQSC = torch.stack([weights[0, :, -6:, 1:31] for weights in output.attentions[1:-1]])
    of_all_LC, of_last_LC = weights_LQSC.mean((1, 2)), weights_LQSC[:, :, -1].mean(1)
    expected_C = sum(x_LC / x_LC.sum(1, keepdim=True) for x_LC in (of_all_LC, of_last_LC)).sum(0) / 2
    segments = [Segment(BOS), Segment(ids, fusor.precompute(ids, BOS)), Segment(question)]
    torch.testing.assert_close(heard(fusor, segments), expected_C, rtol=1e-3, atol=1e-5)


def test_a_miss_is_left_out() -> None:
    """KV that is not computed yet takes no part: the attention is finite, and the missing chunk's tokens are no candidates."""
    fusor = Fusor(tiny_model("llama"))
    stored = chunk(fusor, 20, seed=1)
    attention_C = heard(
        fusor, [Segment(BOS), stored, Segment(draw_ids(12, seed=3)), chunk(fusor, 9, seed=4), Segment(draw_ids(5, seed=2))]
    )
    assert attention_C.shape == (29,)
    assert torch.isfinite(attention_C).all()
    assert (attention_C > 0).all()


def test_a_cached_prefix_changes_no_choice() -> None:
    """With any part of the prompt's start exact the question attends to the same, and nothing of that part runs again."""
    fusor, head = Fusor(tiny_model("llama")), [*BOS, *draw_ids(29, seed=7)]
    after = [chunk(fusor, 20, seed=1), chunk(fusor, 9, seed=4), Segment(draw_ids(5, seed=2))]
    expected = heard(fusor, [Segment(head), *after])
    for tokens in (1, 16, 30):
        exact = Segment(head[:tokens], fusor.precompute(head[:tokens]), exact=True)
        segments = [exact, *([Segment(head[tokens:])] if tokens < 30 else []), *after]
        torch.testing.assert_close(heard(fusor, segments), expected, rtol=1e-3, atol=1e-5)
        assert question_rows(Prompt.of(segments)).tolist() == [*range(tokens, 30), *range(59, 64)]


def test_rows_are_the_start_and_the_question() -> None:
    """What stands fresh at the start runs with the question, and of a long question the last tokens; else the last token."""
    fusor = Fusor(tiny_model("llama"))
    stored = chunk(fusor, 10, seed=1)

    def rows(*segments: Segment) -> list[int]:
        return question_rows(Prompt.of(segments)).tolist()

    assert rows(Segment(BOS), stored, Segment(draw_ids(3, seed=2))) == [0, 11, 12, 13]
    assert rows(Segment(BOS), stored) == [0, 10]
    assert rows(Segment(BOS), stored, Segment(draw_ids(100, seed=2))) == [0, *range(111 - MAX_QUESTION_TOKENS, 111)]


def test_a_model_of_one_layer_asks_nothing() -> None:
    """Its stored KV is exact, so there is no layer to ask, and the blend gives full prefill's logits."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97}
    fusor = Fusor(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).eval())
    ids, question = draw_ids(12, seed=1), draw_ids(4, seed=2)
    fused = fusor.fuse([Segment(BOS), Segment(ids, fusor.precompute(ids, BOS)), Segment(question)])
    assert fused.selection == ()
    torch.testing.assert_close(fused.logits, fusor.prefill([*BOS, *ids, *question]).logits, rtol=1e-4, atol=1e-5)
