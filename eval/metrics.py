"""Scores of answers, nearness to full recompute, and differences between methods with their intervals.

Nearness is measured on distributions rather than on finished answers. Shapes: V vocabulary, G tokens of a given answer.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cacheblend.base.errors import needs_extra
from cacheblend.blend import FusionResult, Fusor
from cacheblend.blend.fidelity import equal_tokens_share
from cacheblend.blend.generation import branch_cache
from cacheblend.eval.data import Example, Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Normalize an answer for comparison, as SQuAD's evaluation script does."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the word F1 against the best of the answers, 0..1."""
    return _best(_f1, prediction, answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction is one of the answers, else 0."""
    return _best(lambda said, wanted: float(normalize(said) == normalize(wanted)), prediction, answers)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    return max(score(prediction, answer) for answer in answers)


def _f1(prediction: str, answer: str) -> float:
    said, wanted = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(said) & Counter(wanted)).values())
    # Two empty texts score 0, as in the script of SQuAD 1.1.
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence against the best of the answers, 0..1.

    Raises:
        MissingExtraError: rouge-score is not installed.
    """
    scorer = rouge_scorer()
    return max(float(scorer.score(answer, prediction)["rougeL"].fmeasure) for answer in answers)


@functools.cache
def rouge_scorer() -> Any:
    """Make the scorer of Rouge-L once."""
    with needs_extra("eval"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=True)


def quality(example: Example, prediction: str) -> Mapping[str, float | None]:
    """Score a prediction by the metrics of the example's task, each 0..1; the first metric compares methods.

    A metric is None if the example has no right answer.
    """
    if example.task is Task.SUMMARIZATION:
        return {"rouge_l": rouge_l(prediction, example.answers) if example.answers else None}
    if not example.answers:
        return {"f1": None, "em": None}
    return {"f1": f1(prediction, example.answers), "em": exact_match(prediction, example.answers)}


GOLD_TOKENS = 64  # of a longer answer (a summary) its beginning is enough, and its forward stays short
COMPARED_TOKENS = 16


def likeliest_answer(fusor: Fusor, fused: FusionResult, answers: Iterable[Sequence[int]]) -> tuple[float, Sequence[int]] | None:
    """Return NLL, in nats, and token ids of the answer that a prompt finds likeliest; None where no answer has a token."""
    positions = fusor.max_positions
    room = GOLD_TOKENS if positions is None else min(GOLD_TOKENS, positions - len(fused.token_ids))
    golds = [ids for answer in answers if (ids := answer[:room])]
    return min(((answer_nll_nats(fusor, fused, ids), ids) for ids in golds), default=None)


@torch.no_grad()
def answer_nll_nats(fusor: Fusor, fused: FusionResult, answer_ids: Sequence[int]) -> float:
    """Return the negative log-likelihood of an answer after a prompt, summed over the answer's tokens, by teacher forcing.

    The prompt's own logits score the first token; one forward over a branch of the prompt's cache scores the others.

    Args:
        fusor: the model.
        fused: the prompt.
        answer_ids: G token ids, at least one.
    """
    logits_GV = fused.logits[None]
    if len(answer_ids) > 1:
        ids = torch.tensor([list(answer_ids[:-1])], device=fusor.decoder.device)
        output: Any = fusor.model(ids, past_key_values=branch_cache(fused.cache), use_cache=True)
        logits_GV = torch.cat([logits_GV, output.logits[0].float()])
    wanted_G1 = torch.tensor(answer_ids, device=logits_GV.device)[:, None]
    return -float(torch.log_softmax(logits_GV.double(), dim=-1).gather(1, wanted_G1).sum())


def equal_greedy_tokens(full_ids: Sequence[int], method_ids: Sequence[int]) -> float:
    """Return the share of full recompute's first 16 greedy tokens that the method generates too."""
    return equal_tokens_share(full_ids[:COMPARED_TOKENS], method_ids)


CONFIDENCE = 0.95
RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500  # bounds memory at 1,000 cases to 4 MB


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the paired differences and the bounds of its 95 % interval; the bounds are None if there is a single pair."""

    mean: float
    low: float | None
    high: float | None


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """`ours` minus `theirs`, case by case, with a percentile bootstrap over cases; deterministic for a seed."""
    differences_N = np.subtract(ours, theirs)
    mean = float(differences_N.mean())
    if len(differences_N) < 2:
        return Difference(mean, None, None)
    rng = np.random.default_rng(seed)
    means = [
        rng.choice(differences_N, size=(_RESAMPLES_AT_ONCE, len(differences_N))).mean(axis=1)
        for _ in range(RESAMPLES // _RESAMPLES_AT_ONCE)
    ]
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [outside, 100 - outside])
    return Difference(mean, float(low), float(high))
