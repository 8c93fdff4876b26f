"""Nearness to full recompute: likelihoods are the model's own, and what a method leaves wrong shows."""

import copy
from typing import Any

import model_families
import pytest
import torch
from fakes import tiny_tokenizer
from tiny_models import CONFIGS, WINDOW, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend.blend import FusionConfig, FusionResult, Fusor, Segment
from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.eval.compute import ModelCompute, compute_share
from cacheblend.eval.data.source import answer_ids
from cacheblend.eval.metrics import answer_nll_nats, equal_greedy_tokens
from cacheblend.service.engine.prompt import PromptRenderer

HEAD, CHUNK, OTHER = (list(range(start, start + 24)) for start in (3, 30, 50))
QUESTION = [71, 72, 80, 75, 90, 6]
PROMPT = [*HEAD, *CHUNK, *OTHER, *QUESTION]
ANSWER = [11, 45, 8, 70, 33]


def _fused(fusor: Fusor, ratio: float, selector: str = "gradual") -> FusionResult:
    chunks = [Segment(chunk, fusor.precompute(chunk, HEAD[:1])) for chunk in (CHUNK, OTHER)]
    head = Segment(HEAD, fusor.precompute(HEAD), exact=True)
    return fusor.fuse([head, *chunks, Segment(QUESTION)], FusionConfig(recompute_ratio=ratio, selector=selector))


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-window"])
def fusor(request: pytest.FixtureRequest) -> Fusor:
    return Fusor(tiny_model(request.param))


def _own_nll(fusor: Fusor, answer: list[int]) -> float:
    """By one plain forward of prompt and answer, without any cache."""
    assert len(PROMPT) > 2 * WINDOW
    with torch.no_grad():
        logits: Any = fusor.model(torch.tensor([[*PROMPT, *answer]]), use_cache=False).logits[0].double()
    wanted = torch.tensor(answer)
    return -float(torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1)[torch.arange(len(answer)), wanted].sum())


@pytest.mark.parametrize("tokens", [1, 2, 3 * WINDOW])
def test_teacher_forcing_is_the_models_own_forward(fusor: Fusor, tokens: int) -> None:
    """An answer's likelihood after a prefilled prompt is that of a plain forward, also where it passes the sliding window."""
    answer = [(7 * index) % 90 + 3 for index in range(tokens)]
    assert answer_nll_nats(fusor, fusor.prefill(PROMPT), answer) == pytest.approx(_own_nll(fusor, answer), abs=1e-3)


def test_marking_leaves_the_prompt_as_it_is(fusor: Fusor) -> None:
    """The prompt's cache, and what is generated after it, are the same before and after an answer was marked."""
    fused = _fused(fusor, 0.3)
    layers: list[Any] = fused.cache.layers
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    generated = fusor.generate(fused, 6)
    first = answer_nll_nats(fusor, fused, ANSWER)
    assert answer_nll_nats(fusor, fused, ANSWER) == first
    assert fusor.generate(fused, 6) == generated
    for layer, (k, v) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)


def test_ratio_1_is_near_and_reuse_is_not(fusor: Fusor) -> None:
    """Against itself full recompute is exact, ratio 1.0 is that but for rounding, and full reuse's error shows in both."""
    full = fusor.prefill(PROMPT)
    assert first_token_kl_nats(full.logits, full.logits) == 0
    near, far = _fused(fusor, 1.0), _fused(fusor, 0.0)
    own = answer_nll_nats(fusor, full, ANSWER)
    assert first_token_kl_nats(full.logits, near.logits) < 1e-6
    assert answer_nll_nats(fusor, near, ANSWER) == pytest.approx(own, abs=1e-3)
    assert first_token_kl_nats(full.logits, far.logits) > 1e-3
    assert abs(answer_nll_nats(fusor, far, ANSWER) - own) > 1e-2


def test_a_planted_fault_in_the_cache_is_caught(fusor: Fusor) -> None:
    """One value of one key turned around after the right first logits shows in the answer's likelihood."""
    full = fusor.prefill(PROMPT)
    own, layer = answer_nll_nats(fusor, full, ANSWER), fusor.prefill(PROMPT)
    last: Any = layer.cache.layers[-1]
    last.values[..., -3, :] *= -1
    assert abs(answer_nll_nats(fusor, layer, ANSWER) - own) > 1e-3


def test_equal_tokens_are_counted_in_the_first_16() -> None:
    """A difference beyond full recompute's first 16 tokens, or beyond its answer, does not count."""
    assert equal_greedy_tokens([1, 2], [1, 2, 3]) == 1
    assert equal_greedy_tokens(range(32), [*range(16), 99]) == 1
    assert equal_greedy_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5


def test_compute_is_a_share_of_full_prefills(fusor: Fusor) -> None:
    """Full recompute is 1; full reuse pays the question alone; it grows with the ratio; a selector's own pass is added."""
    model = ModelCompute.of(fusor.decoder)
    shares = [compute_share(_fused(fusor, ratio), model) for ratio in (0.0, 0.1, 0.5, 1.0)]
    assert compute_share(fusor.prefill(PROMPT), model) == 1
    assert shares == sorted(shares)
    # The question is a thirteenth of the prompt, and the last layer runs one row.
    assert 0.03 < shares[0] < 0.12
    assert shares[-1] < 1
    by_attention = [compute_share(_fused(fusor, ratio, "question_attention"), model) for ratio in (0.0, 0.1, 0.5, 1.0)]
    assert by_attention == sorted(by_attention)
    assert (by_attention[0], by_attention[-1]) == (shares[0], shares[-1])
    assert by_attention[1] < shares[1]  # layer 0 runs the chosen tokens alone
    asking, chosen = _fused(fusor, 0.1, "question_attention"), _fused(fusor, 0.1, "first_tokens")
    assert [report.recomputed for report in asking.selection] == [len(QUESTION)] * (len(model.layers) - 1)
    assert compute_share(asking, model) > compute_share(chosen, model)  # the question's own pass counts


def test_compute_is_counted_by_hand() -> None:
    """A Llama's prefill of five tokens: matrices times rows, and scores of each row with what stands before it."""
    model = ModelCompute.of(Fusor(tiny_model("llama")).decoder)
    config = CONFIGS["llama"]()
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrices = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * inner
    scores = 2 * hidden * (1 + 2 + 3 + 4 + 5)
    assert model.full_prefill(5) == layers * (5 * matrices + scores) + hidden * 97


def test_compute_of_layers_of_different_shapes() -> None:
    """A prefill of seven tokens by hand: KV heads of each kind of layer, a window, and layers that read another's KV."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no gemma4_text")
    fusor = Fusor(model_families.tiny_model("gemma4_text", sliding_window=3))
    model = ModelCompute.of(fusor.decoder)
    own = [sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2) for layer in fusor.model.model.layers]
    assert [layer.row for layer in (*model.layers, *model.shared)] == own
    assert [layer.kv for layer in model.layers] == [2 * 64 * 2 * 16, 2 * 64 * 32] * 2
    sliding, full = (2 * 4 * size * keys for size, keys in ((16, 1 + 2 + 5 * 3), (32, 28)))
    assert model.full_prefill(7) == 7 * sum(own) + 3 * sliding + 3 * full + 64 * 256
    assert compute_share(fusor.prefill(list(range(3, 50))), model) == 1


def test_an_answer_is_tokenised_as_it_follows_the_prompt() -> None:
    """After a plain text's cue an answer begins with a space, after a chat template's with nothing."""
    decode, chat = tiny_tokenizer().decode, copy.copy(tiny_tokenizer())
    chat.chat_template = "<s>user: {{ messages[0]['content'] }}</s>assistant: "
    plain = PromptRenderer(tiny_tokenizer(), "Read.\n")
    assert decode((*plain.question("What?").suffix, *answer_ids(plain, "a loop"))) == "Question: What?\nAnswer: a loop"
    assert decode(answer_ids(PromptRenderer(chat, "Read.\n"), "a loop")) == "a loop"
    assert decode(answer_ids(PromptRenderer(chat, "Read.\n", chat=False), "a loop")) == " a loop"
