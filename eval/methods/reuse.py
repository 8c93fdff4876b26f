"""Blending: every chunk's stored KV at its place, and the selected tokens recomputed (paper §4)."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend.blend import FusionConfig, FusionResult, Fusor, SelectionStep
from cacheblend.blend.selection import Oracle

from .method import PrefillMethod, ResidentRequest


class Blend(PrefillMethod):
    """Chunks reused anywhere, some of their tokens recomputed.

    Args:
        fusor: the model.
        config: ratio and selector.
        context: what the chunks' KV was computed after; one of `CONTEXTS`.
    """

    def __init__(self, fusor: Fusor, config: FusionConfig, context: str) -> None:
        super().__init__(fusor)
        self._config, self._context = config, context

    def prepare(self, resident: ResidentRequest) -> None:
        """The chunks' KV and the head's."""
        _ = resident.head_kv, resident.chunk_kv(self._context)

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """Fuse."""
        return self._fusor.fuse(resident.blend_segments(self._context), self.config_for(resident))

    def config_for(self, resident: ResidentRequest) -> FusionConfig:
        """Ratio and selector for one request."""
        return self._config

    def loaded_bytes(self, resident: ResidentRequest, fused: FusionResult) -> int:
        """The chunks' KV from layer 1 up, layer 0 too where not all of its tokens ran, and the head's."""
        ran_layer_0 = len(fused.recomputed[0]) == len(fused.token_ids) - fused.exact_tokens
        chunks = [kv for kv in resident.chunk_kv(self._context) if kv is not None]
        loaded = sum(k.nbytes + v.nbytes for kv in chunks for k, v in kv.layers[1 if ran_layer_0 else 0 :])
        return loaded + (0 if resident.head_kv is None else resident.head_kv.nbytes)


class OracleBlend(Blend):
    """Blending that knows full prefill: the tokens of largest error of values, weighed by the question's attention.

    A bound for selectors, not a method: its TTFT has the full prefill in it.
    """

    def config_for(self, resident: ResidentRequest) -> FusionConfig:
        """The tokens of this request."""
        listening = _Listening()
        reused = self._fusor.fuse(resident.blend_segments(self._context), FusionConfig(selector=listening))
        full = self._fusor.prefill(resident.prompt.token_ids)
        error_N = torch.zeros(len(full.token_ids))
        layers: Any = zip(full.cache.layers, reused.cache.layers, strict=True)
        for own, stored in layers:
            off = (own.values - stored.values).float().square().sum((0, 1, 3)).sqrt().cpu()
            error_N[-len(off) :] += off / off.mean().clamp_min(torch.finfo(torch.float32).tiny)
        error_N[listening.candidates_C] *= listening.attention_C
        ratio = self._config.ratio
        return FusionConfig(recompute_ratio=ratio, selector=Oracle(ratio, error_N))


class _Listening:
    """A selector that keeps nothing, and remembers what the question attends to."""

    reads_attention = True

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep none."""
        if step.layer == 0:
            self.candidates_C, self.attention_C = step.candidates_C, step.attention_C
        return step.none()


class FullRecompute(PrefillMethod):
    """Nothing is reused."""

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """The Hugging Face model's own forward."""
        return self._fusor.prefill(resident.prompt.token_ids)


class PrefixCache(PrefillMethod):
    """The paper's ideal form: the prefix lies in RAM, and its loading is not waited for.

    Other requests warm it, never the same prompt: see `history`.
    """

    def prepare(self, resident: ResidentRequest) -> None:
        """The prefix's KV."""
        _ = resident.prefix_kv

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """Run what stands after the prefix."""
        return self._fusor.fuse(resident.prefix_segments())

    def loaded_bytes(self, resident: ResidentRequest, fused: FusionResult) -> int:
        """The prefix's KV."""
        return 0 if resident.prefix_kv is None else resident.prefix_kv.nbytes
