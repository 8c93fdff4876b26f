"""Answer quality, nearness to full recompute, what was computed, and differences between methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from cacheblend.service.serving.quality_guard import first_token_kl_nats as first_token_kl_nats
    from cacheblend.service.serving.quality_guard import relative_kv_error as relative_kv_error

    from .answers import exact_match as exact_match
    from .answers import f1 as f1
    from .answers import normalize as normalize
    from .answers import quality as quality
    from .answers import rouge_l as rouge_l
    from .compute import ModelCompute as ModelCompute
    from .compute import compute_share as compute_share
    from .fidelity import COMPARED_TOKENS as COMPARED_TOKENS
    from .fidelity import GOLD_TOKENS as GOLD_TOKENS
    from .fidelity import Difference as Difference
    from .fidelity import answer_nll_nats as answer_nll_nats
    from .fidelity import equal_greedy_tokens as equal_greedy_tokens
    from .fidelity import paired_difference as paired_difference

_MODULES = {
    "cacheblend.service.serving.quality_guard": (
        "first_token_kl_nats",
        "relative_kv_error",
    ),
    ".answers": (
        "exact_match",
        "f1",
        "normalize",
        "quality",
        "rouge_l",
    ),
    ".compute": (
        "ModelCompute",
        "compute_share",
    ),
    ".fidelity": (
        "COMPARED_TOKENS",
        "GOLD_TOKENS",
        "Difference",
        "answer_nll_nats",
        "equal_greedy_tokens",
        "paired_difference",
    ),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
