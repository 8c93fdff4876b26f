"""CacheBlend: every chunk's own KV at its place, and the HKVD tokens recomputed (paper §4)."""

from __future__ import annotations

from cacheblend.blend import FusedPrompt, FusionConfig, Fusor

from .method import PrefillMethod
from .resident import ResidentRequest


class Blend(PrefillMethod):
    """Chunks reused anywhere, some of their tokens recomputed.

    Args:
        fusor: the model.
        config: ratio and selector.
    """

    def __init__(self, fusor: Fusor, config: FusionConfig) -> None:
        super().__init__(fusor)
        self._config = config

    def prepare(self, resident: ResidentRequest) -> None:
        """The chunks' KV and the head's."""
        _ = resident.head_kv, resident.chunk_kv

    def prefill(self, resident: ResidentRequest) -> FusedPrompt:
        """Fuse."""
        return self._fusor.fuse(resident.blend_segments(), self.config_for(resident))

    def config_for(self, resident: ResidentRequest) -> FusionConfig:
        """Ratio and selector for one request."""
        return self._config

    def loaded_bytes(self, resident: ResidentRequest, fused: FusedPrompt) -> int:
        """The chunks' KV from layer 1 up, layer 0 too where not all of its tokens ran, and the head's."""
        ran_layer_0 = len(fused.recomputed[0]) == len(fused.token_ids) - fused.exact_tokens
        chunks = [kv for kv in resident.chunk_kv if kv is not None]
        loaded = sum(k.nbytes + v.nbytes for kv in chunks for k, v in kv.layers[1 if ran_layer_0 else 0 :])
        return loaded + (0 if resident.head_kv is None else resident.head_kv.nbytes)


def gradual(fusor: Fusor, ratio: float) -> Blend:
    """Gradual filtering, by the deviation measured in the prompt and by the one known of the chunk's document."""
    return Blend(fusor, FusionConfig(recompute_ratio=ratio))


def measured_alone(fusor: Fusor, ratio: float) -> Blend:
    """Gradual filtering by the deviation measured in the prompt alone: the paper's scheme (§4.3, figure 9)."""
    return Blend(fusor, FusionConfig(recompute_ratio=ratio, context_weight=0.0))


def known_before(fusor: Fusor, ratio: float) -> Blend:
    """The same tokens at every layer, layer 0 too, chosen before any has run: by what is known of the chunks' documents."""
    return Blend(fusor, FusionConfig(recompute_ratio=ratio, selector="single_shot", candidate_ratio=0.0))


def single_shot(fusor: Fusor, ratio: float) -> Blend:
    """The paper's choice at layer 1 kept for all layers, as others ship it."""
    return Blend(fusor, FusionConfig(recompute_ratio=ratio, selector="single_shot", context_weight=0.0))


def full_reuse(fusor: Fusor) -> Blend:
    """Full KV reuse: ratio 0 (paper figure 1c), keys turned to their place as PromptCache does by other means."""
    return Blend(fusor, FusionConfig(recompute_ratio=0.0))
