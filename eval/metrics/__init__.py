"""Answer quality, differences between methods, and KV deviation."""

from cacheblend.blend.deviation_left import deviation_left

from .answer_text import exact_match, f1, normalize
from .difference import Difference, paired_difference
from .quality import quality
from .rouge_l import rouge_l

__all__ = ["Difference", "deviation_left", "exact_match", "f1", "normalize", "paired_difference", "quality", "rouge_l"]
