"""Answer quality, nearness to full recompute, what was computed, and differences between methods."""

from cacheblend.blend.deviation import first_token_kl_nats, relative_kv_error

from .answers import exact_match, f1, normalize, quality, rouge_l
from .compute import ModelCompute, compute_share
from .fidelity import COMPARED_TOKENS, GOLD_TOKENS, Difference, answer_nll_nats, equal_greedy_tokens, paired_difference

__all__ = [
    "COMPARED_TOKENS",
    "GOLD_TOKENS",
    "Difference",
    "ModelCompute",
    "answer_nll_nats",
    "compute_share",
    "equal_greedy_tokens",
    "exact_match",
    "f1",
    "first_token_kl_nats",
    "normalize",
    "paired_difference",
    "quality",
    "relative_kv_error",
    "rouge_l",
]
