"""A served answer with its plan, as a line of a file, and its replay alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from cacheblend.blend import ExplicitPositions, FusionConfig, FusionResult, Fusor, Segment
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.service import Answer, AnswerPlan
from cacheblend.service.engine.chunk_context import chunk_context
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.prompt import PromptRenderer

TIE = 1e-3  # of two logits: closer ones may change places by rounding
Verdict = Literal["equal", "tie", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """What a replay needs of an answer, in plain values.

    A segment has its kind, its token ids, and the chunks of its document that it is computed after; `recomputed` has per layer
    the positions that were recomputed.
    """

    method: str
    segments: Sequence[tuple[str, Sequence[int], Sequence[Sequence[int]]]]
    recomputed: Sequence[Sequence[int]]
    token_ids: Sequence[int]
    text: str

    @classmethod
    def of(cls, answer: Answer) -> RecordedAnswer:
        """Of a served answer."""
        return cls.of_plan(answer.plan, answer.token_ids, answer.text)

    @classmethod
    def of_plan(cls, plan: AnswerPlan, token_ids: Sequence[int], text: str = "") -> RecordedAnswer:
        """Of a plan and the tokens that came of it."""
        return cls(
            method=plan.method,
            segments=[(segment.kind, segment.token_ids, segment.earlier) for segment in plan.segments],
            recomputed=[positions.tolist() for positions in plan.recomputed],
            token_ids=token_ids,
            text=text,
        )

    @classmethod
    def from_line(cls, line: str) -> RecordedAnswer:
        """Read what `line` gave."""
        return cls(**json.loads(line))

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def replay_prompt(fusor: Fusor, recorded: RecordedAnswer) -> FusionResult:
    """Prefill a recorded prompt alone, from KV that is computed anew."""
    if recorded.method == "full_recompute":
        return fusor.prefill([token for _, token_ids, _ in recorded.segments for token in token_ids])
    head = PromptRenderer(fusor.tokenizer, INSTRUCTION).prefix
    context = chunk_context(fusor, "auto", DOCUMENT_TOKENS)

    def segment_of(kind: str, token_ids: Sequence[int], earlier: Sequence[Sequence[int]]) -> Segment:
        if kind == "fresh":
            return Segment(token_ids)
        if kind == "exact":
            return Segment(token_ids, fusor.precompute(token_ids), exact=True)
        (kv,) = fusor.precompute_document([*earlier, token_ids], head, [len(earlier)], context)
        return Segment(token_ids, kv)

    segments = [segment_of(*segment) for segment in recorded.segments]
    return fusor.fuse(segments, FusionConfig(selector=ExplicitPositions(recorded.recomputed)))


def check_replay(fusor: Fusor, recorded: RecordedAnswer) -> Verdict:
    """Replay an answer alone, and compare; a "tie" differs where the replay's two best logits are closer than `TIE`."""
    fused = replay_prompt(fusor, recorded)
    replayed, answered = fusor.generate(fused, len(recorded.token_ids)), list(recorded.token_ids)
    if replayed == answered:
        return "equal"
    same = next(at for at, (one, other) in enumerate(zip(replayed, answered, strict=False)) if one != other)
    return "tie" if _gap(fusor, recorded, answered[:same]) < TIE else "differs"


@torch.no_grad()
def _gap(fusor: Fusor, recorded: RecordedAnswer, token_ids: Sequence[int]) -> float:
    """How far apart the two best logits are behind a prompt and these tokens."""
    fused = replay_prompt(fusor, recorded)
    logits_V = fused.logits
    if token_ids:
        output: Any = fusor.model(torch.tensor([token_ids]), past_key_values=fused.cache, logits_to_keep=1)
        logits_V = output.logits[0, -1]
    best, second = logits_V.topk(2).values.tolist()
    return best - second
