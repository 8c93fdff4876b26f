"""Several sequences decoded in one batch get what each gets alone."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from prompts import rag_prompt
from tiny_models import CONFIGS, WINDOW, tiny_model
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend.blend import FusionConfig, FusionResult, Fusor, NextToken, Segment, SequenceKV
from cacheblend.blend.generation import branch_cache

TOKENS = 2 * WINDOW
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0}


def prompts(fusor: Fusor) -> list[FusionResult]:
    """A blended one, one below every window, and one in full."""
    blended = rag_prompt(fusor)
    return [
        fusor.fuse(blended, FusionConfig(recompute_ratio=0.3)),
        fusor.prefill([1, 5, 9]),
        fusor.fuse([Segment(blended[4].token_ids), Segment([7])]),
    ]


def continued(model: Any, fused: FusionResult, max_new_tokens: int, **kwargs: Any) -> list[int]:
    """The tokens of `model.generate` after a prompt, whose first forward returns the prompt's logits."""
    cache, prompt_1N = branch_cache(fused.cache), torch.tensor([fused.token_ids])
    prefilled = [CausalLMOutputWithPast(logits=fused.logits[None, None], past_key_values=cache)]
    continuation, own_forward = copy.copy(model), model.forward

    @functools.wraps(own_forward)
    def forward(*args: Any, **inputs: Any) -> Any:
        return prefilled.pop() if prefilled else own_forward(*args, **inputs)

    continuation.forward = forward
    options = {"attention_mask": torch.ones_like(prompt_1N), "past_key_values": cache, "max_new_tokens": max_new_tokens}
    sequences = continuation.generate(prompt_1N, **options, **kwargs)
    return [int(token) for token in sequences[0, len(fused.token_ids) :]]


def decode(fusor: Fusor, fused: list[FusionResult], drawers: list[NextToken], *, join_every: int = 3) -> list[list[int]]:
    """Tokens of each; one more sequence joins every few steps, and each leaves when it is done."""
    running: list[tuple[NextToken, SequenceKV]] = []
    waiting = list(zip(fused, drawers, strict=True))
    step = 0
    while running or waiting:
        if waiting and step % join_every == 0:
            prompt, drawer = waiting.pop(0)
            drawer.draw(prompt.logits)
            running.append((drawer, SequenceKV(prompt, fusor.decoder.windows)))
        step += 1
        running = [(drawer, kv) for drawer, kv in running if drawer.finish_reason is None]
        if running:
            logits_RV = fusor.decoder.decode([drawer.token_ids[-1] for drawer, _ in running], [kv for _, kv in running])
            for (drawer, _), logits_V in zip(running, logits_RV, strict=True):
                drawer.draw(logits_V)
    return [drawer.token_ids for drawer in drawers]


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_equals_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every family the greedy tokens of a batch are `generate`'s, past the window and past a growth of the KV."""
    fusor = Fusor(tiny_model(name))
    fused = prompts(fusor)
    lengths = [9, TOKENS, 4]
    drawers = [NextToken(fusor.model, prompt.token_ids, length) for prompt, length in zip(fused, lengths, strict=True)]
    alone = [continued(fusor.model, prompt, length) for prompt, length in zip(fused, lengths, strict=True)]
    copied = [fused[0], *(replace(prompt, memory=[]) for prompt in fused[1:])]
    monkeypatch.setattr("cacheblend.blend.generation.GROWTH_TOKENS", 5)
    assert decode(fusor, copied, drawers) == alone
    assert [int(prompt.cache.get_seq_length()) for prompt in fused] == [len(prompt.token_ids) for prompt in fused]


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_sequences_behind_one_prompt_do_not_share_room(name: str) -> None:
    """The first grows after the prompt's own KV, the second in a copy; each gets what it gets alone, and the cache stays."""
    fusor = Fusor(tiny_model(name))
    fused = prompts(fusor)[0]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in fused.cache.layers]
    tokens = [[3, 4, 5, 6], [9, 8, 7, 2]]
    alone = []
    for own in tokens:
        kv = SequenceKV(replace(fused, memory=[]), fusor.decoder.windows)
        alone.append([fusor.decoder.decode([token], [kv])[0] for token in own])
    assert fused.memory
    both = [SequenceKV(fused, fusor.decoder.windows) for _ in range(2)]
    assert not fused.memory
    here = [kv.layers[0].last(1)[0].data_ptr() == fused.cache.layers[0].keys[0, :, -1:].data_ptr() for kv in both]
    assert here == [fusor.decoder.windows[0] is None, False]
    for step, pair in enumerate(zip(*tokens, strict=True)):
        for number, logits_V in enumerate(fusor.decoder.decode(pair, both)):
            torch.testing.assert_close(logits_V, alone[number][step], rtol=1e-4, atol=1e-4)
    for layer, (k_1HND, v_1HND) in zip(fused.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, k_1HND)
        assert torch.equal(layer.values, v_1HND)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(40))},
        {"eos_token_id": list(range(40))},
    ],
    ids=str,
)
def test_generation_config(settings: dict[str, object]) -> None:
    """Processors and stopping of the generation config are `generate`'s."""
    fusor = Fusor(tiny_model("llama"))
    prompt = fusor.prefill([1, 5, 9])
    drawer = NextToken(fusor.model, prompt.token_ids, 20, **settings)
    plain = continued(fusor.model, prompt, 20)
    assert decode(fusor, [prompt], [drawer])[0] == continued(fusor.model, prompt, 20, **settings) != plain


def test_sampling() -> None:
    """A seed gives the same sample again, alone or in a batch, with `generate`'s distribution; another seed gives another."""
    fusor = Fusor(tiny_model("llama"))
    fused = prompts(fusor)

    def sample(seeds: list[int]) -> list[list[int]]:
        drawers = [NextToken(fusor.model, p.token_ids, 12, seed, **SAMPLED) for p, seed in zip(fused, seeds, strict=False)]
        return decode(fusor, fused[: len(seeds)], drawers)

    batch = sample([1, 2, 3])
    assert sample([1])[0] == batch[0]
    assert sample([4])[0] != batch[0]
    torch.manual_seed(11)
    assert (
        NextToken(fusor.model, fused[0].token_ids, 1, 11, **SAMPLED).draw(fused[0].logits)
        == continued(fusor.model, fused[0], 1, **SAMPLED)[0]
    )
