"""Metrics agree with the official scripts; intervals are what they say."""

import sys

import numpy as np
import pytest

from cacheblend.base.errors import MissingExtraError
from cacheblend.eval.metrics import exact_match, f1, paired_difference, rouge_l, rouge_scorer


@pytest.mark.parametrize(
    ("prediction", "answers", "f1_", "em"),
    [
        ("The Cat  sat.", ["a cat sat"], 1, 1),  # case, articles, signs and spaces do not count
        ("1,000", ["x", "1000"], 1, 1),
        ("co-op", ["co op"], 0, 0),
        ("cat", ["the cat sat"], 2 / 3, 0),
        ("us us", ["U.S."], 2 / 3, 0),  # a word counts once for each time that both have it
        ("dog", ["cat", "dog house", "big dog house"], 2 / 3, 0),  # the best of the answers
        ("", ["the"], 0, 1),
        ("an answer", ["theanswer"], 0, 0),
    ],
)
def test_f1_and_em_are_squads(prediction: str, answers: list[str], f1_: float, em: float) -> None:
    """F1 and EM are those of SQuAD's evaluate-v1.1.py, best over the answers."""
    assert f1(prediction, answers) == pytest.approx(f1_)
    assert exact_match(prediction, answers) == em


def test_rouge_l(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rouge-L is stemmed, best over the answers; without its package the error says what to install."""
    assert rouge_l("he works", ["he working"]) == pytest.approx(1.0)
    assert rouge_l("a b c", ["x", "a c"]) == pytest.approx(0.8)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    rouge_scorer.cache_clear()
    with pytest.raises(MissingExtraError, match=r"\.\[eval\]"):
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
    assert paired_difference([0.5], [0.25]).low is None
