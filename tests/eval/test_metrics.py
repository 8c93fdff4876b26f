"""Metrics agree with the official scripts; intervals and deviations are what they say."""

from __future__ import annotations

import random
import re
import string
import sys

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import DynamicCache

from cacheblend.base.errors import MissingExtraError
from cacheblend.blend.fidelity import relative_kv_error
from cacheblend.eval.metrics import exact_match, f1, paired_difference, rouge_l, rouge_scorer

WORDS = [
    "the",
    "The",
    "a",
    "an",
    "Paris,",
    "paris",
    "U.S.",
    "us",
    "co-op",
    "1,000",
    "1000",
    "it's",
    "its",
    "",
    "  ",
    "é",
    "\n",
    "!",
]


def _squad_normalize(answer: str) -> str:
    """Step by step as SQuAD's evaluate-v1.1.py does."""
    answer = answer.lower()
    answer = "".join(character for character in answer if character not in set(string.punctuation))
    answer = re.sub(r"\b(a|an|the)\b", " ", answer)
    return " ".join(answer.split())


def _squad_f1(prediction: str, truth: str) -> float:
    said, wanted = _squad_normalize(prediction).split(), _squad_normalize(truth).split()
    left = list(wanted)
    same = 0
    for word in said:
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _pairs(count: int) -> list[tuple[str, list[str]]]:
    rng = random.Random(0)

    def draw() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(0, 8)))

    return [(draw(), [draw() for _ in range(rng.randint(1, 3))]) for _ in range(count)]


def test_f1_and_em_are_squads() -> None:
    """On 1,000 generated pairs F1 and EM are those of SQuAD's script, best over the answers."""
    for prediction, answers in _pairs(1000):
        assert f1(prediction, answers) == pytest.approx(max(_squad_f1(prediction, answer) for answer in answers), abs=1e-9)
        same = any(_squad_normalize(prediction) == _squad_normalize(answer) for answer in answers)
        assert exact_match(prediction, answers) == float(same)


def test_rouge_l_is_rouge_scores() -> None:
    """On 1,000 generated pairs Rouge-L is that of rouge-score with stemming, best over the answers."""
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for prediction, answers in _pairs(1000):
        wanted = max(scorer.score(answer, prediction)["rougeL"].fmeasure for answer in answers)
        assert rouge_l(prediction, answers) == pytest.approx(wanted, abs=1e-9)
    assert rouge_l("he works", ["he working"]) == pytest.approx(1.0)


def test_rouge_l_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rouge-score, which a plain install does not bring, the error says what to install."""
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    rouge_scorer.cache_clear()
    with pytest.raises(MissingExtraError, match=r"cacheblend\[eval\]"):
        rouge_l("a", ["a"])


def test_differences_are_paired() -> None:
    """A constant difference has an interval of no width though the cases vary, and a noisy one holds its mean."""
    rng = np.random.default_rng(1)
    full = rng.random(200)
    constant = paired_difference(full - 0.1, full)
    assert (constant.mean, constant.low, constant.high) == pytest.approx((-0.1, -0.1, -0.1))
    noisy = paired_difference(full + rng.normal(0, 0.1, 200), full)
    assert noisy.low is not None
    assert noisy.high is not None
    assert noisy.low < noisy.mean < noisy.high
    assert noisy.high - noisy.low == pytest.approx(4 * 0.1 / 200**0.5, rel=0.3)
    assert paired_difference([0.5], [0.25]) == paired_difference([0.5], [0.25])
    assert paired_difference([0.5], [0.25]).low is None


def test_deviation_is_relative() -> None:
    """None against itself, 1 against zeros, and the squared share of a scaled cache."""
    keys, values = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)

    def cache(scale: float) -> DynamicCache:
        made = DynamicCache()
        for layer in range(2):
            made.update(scale * keys, scale * values, layer)
        return made

    assert relative_kv_error(cache(1.0), cache(1.0)) == 0
    assert relative_kv_error(cache(0.0), cache(1.0)) == pytest.approx(1.0)
    assert relative_kv_error(cache(1.1), cache(1.0)) == pytest.approx(0.01, rel=1e-4)
