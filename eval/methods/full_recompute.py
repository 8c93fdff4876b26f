"""Full KV recompute: the model's own prefill, the reference (paper figure 1a)."""

from __future__ import annotations

from cacheblend.blend import FusedPrompt

from .method import PrefillMethod
from .resident import ResidentRequest


class FullRecompute(PrefillMethod):
    """Nothing is reused."""

    def prefill(self, resident: ResidentRequest) -> FusedPrompt:
        """The Hugging Face model's own forward."""
        return self._fusor.prefill(resident.pieces.token_ids)
