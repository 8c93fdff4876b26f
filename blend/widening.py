"""Widening: a request that needs more recompute than others gets it, and is recognised by its first token.

Requests differ a hundredfold in what they need: a twentieth of the tokens is often enough for full prefill's answer, and a
question over two documents may need half of them. What the question attends to does not tell them apart; a first round of a
blend does. Where a few recomputed tokens move the distribution of the first token from full reuse's, context matters, and a
second round recomputes more (docs/adr/031).
"""

from collections.abc import Generator
from dataclasses import replace

import torch

from .attention import upload
from .fidelity import first_token_kl_nats
from .fusion import Fusion
from .interfaces import LayerSink, LayerSource, ModelRunner
from .prompt import FusionResult, LayerReport, Prompt
from .selectors.question_attention import QuestionAttention

FIRST_RATIO, WIDE_RATIO = 0.05, 0.3  # of the two rounds


def widening_steps(
    runner: ModelRunner, prompt: Prompt, ratio: float, max_loss_nats: float, source: LayerSource, sink: LayerSink | None = None
) -> Generator[LayerReport, None, FusionResult]:
    """Blend a prompt at `ratio`, and again at `WIDE_RATIO` where its first token moved too far; a layer a step.

    The second round is the blend at `WIDE_RATIO`, with what the first one loaded and what its question attended to. Rows that
    stayed as the first round left them would know no more of each other than before, and lose what widening gains.

    Args:
        runner: the model.
        prompt: the prompt.
        ratio: of the first round, above 0 and below `WIDE_RATIO`.
        max_loss_nats: KL of the first token's distribution between full reuse and the first round that is no reason to widen.
        source: brings the stored KV.
        sink: receives the finished layers at the end; the result has logits all the same.
    """
    fusion = Fusion(runner, prompt, QuestionAttention(ratio), source, keeps_reuse=True)
    result = yield from fusion.steps()
    if fusion.reuse_logits is not None:  # else nothing is reused, or one layer is all there is
        moved = torch.tensor([first_token_kl_nats(result.logits, fusion.reuse_logits), 1.0])
        moved_nats, ranks = runner.reduce(upload(moved, runner.geometry.device)).tolist()
        moved_nats /= ranks  # the same on all, so that all widen or none does
        if moved_nats > max_loss_nats:
            first, result = result, (yield from fusion.repeat(QuestionAttention(WIDE_RATIO)))
            result = replace(result, is_widened=True, selection=(*first.selection, *first.layers))
        result = replace(result, moved_nats=moved_nats)
    if sink is not None:
        for layer, layer_kv in enumerate(fusion.layers):
            sink.put(layer, layer_kv)
    return result
