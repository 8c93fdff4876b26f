"""Answer quality, nearness to full recompute, what was computed, and differences between methods."""

from cacheblend.blend.deviation import deviation_left, first_token_kl_nats

from .answer_text import exact_match, f1, normalize
from .compute import ModelCompute, compute_share
from .difference import Difference, paired_difference
from .fidelity import COMPARED_TOKENS, GOLD_TOKENS, answer_nll_nats, equal_greedy_tokens
from .quality import quality
from .rouge_l import rouge_l

__all__ = [
    "COMPARED_TOKENS",
    "GOLD_TOKENS",
    "Difference",
    "ModelCompute",
    "answer_nll_nats",
    "compute_share",
    "deviation_left",
    "equal_greedy_tokens",
    "exact_match",
    "f1",
    "first_token_kl_nats",
    "normalize",
    "paired_difference",
    "quality",
    "rouge_l",
]
