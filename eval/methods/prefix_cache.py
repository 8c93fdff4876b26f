"""Prefix caching: the longest prefix that another request left is exact, the rest is recomputed (paper figure 1b)."""

from __future__ import annotations

from cacheblend.blend import FusedPrompt

from .method import PrefillMethod
from .resident import ResidentRequest


class PrefixCache(PrefillMethod):
    """The paper's ideal form: the prefix lies in RAM, and its loading is not waited for.

    Other requests warm it, never the same prompt: see `history`.
    """

    def prepare(self, resident: ResidentRequest) -> None:
        """The prefix's KV."""
        _ = resident.prefix_kv

    def prefill(self, resident: ResidentRequest) -> FusedPrompt:
        """Run what stands behind the prefix."""
        return self._fusor.fuse(resident.prefix_segments())

    def loaded_bytes(self, resident: ResidentRequest, fused: FusedPrompt) -> int:
        """The prefix's KV."""
        return 0 if resident.prefix_kv is None else resident.prefix_kv.nbytes
