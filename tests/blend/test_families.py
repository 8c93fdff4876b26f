"""Every verified family blends: a tiny model of each, a dense replay of each kind of layer, and faults that must show."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_families import WRAPPERS, tiny_model, verdict
from prompts import draw_ids
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend.blend import FusionConfig, FusionResult, Fusor, KVGeometry, Segment, anatomy, decoder, layer_passes
from cacheblend.blend.anatomy import LayerAnatomy
from cacheblend.blend.families import VERIFIED
from cacheblend.blend.loading import kv_geometry, read_config

pytestmark = pytest.mark.contract

# One family of each kind of layer that is not Llama's. Hunyuan's norm after the rotation is not among them: its weights see the
# numbers of a head turned, so that a chunk's KV depends a little on where it was computed.
KINDS = {
    "sinks": "gpt_oss",
    "layers without rotary embedding": "smollm3",
    "norms after the attention": "olmo3",
    "latent attention": "deepseek_v3",
    "shared KV, values made of keys, sizes of each layer": "gemma4_text",
    "parallel hidden states": "gemma3n_text",
    "keys and values of different sizes": "mimo_v2_flash",
    "rotation of neighbours, chunked attention": "llama4_text",
}
SEEN_IN_WRAPPERS = {
    "glm4v_text",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
}  # no class of their own


@functools.cache
def fusor_of(family: str) -> Fusor:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return Fusor(tiny_model(family), allow_unverified=True)


@pytest.mark.parametrize("family", sorted({*VERIFIED, *WRAPPERS} - SEEN_IN_WRAPPERS))
def test_blends(family: str) -> None:
    """Ratio 1.0 has the model's own logits, reuse and selection run, and decoding goes on as `generate` does."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if family == "cohere_compass_text" and transformers.__version__ < "5.20":
        pytest.skip("this transformers cannot make a tiny model of it")
    assert verdict(family).reason == ""


def test_a_wrapper_is_loaded_from_its_folder(tmp_path: Path) -> None:
    """A model that sees images is loaded by its own class, and its decoder blends inside it."""
    tiny_model("mistral3").save_pretrained(tmp_path)
    fusor = Fusor.from_pretrained(str(tmp_path))
    ids = draw_ids(40, 1)
    fused = fusor.fuse([Segment(ids[:20], fusor.precompute(ids[:20])), Segment(ids[20:])], FusionConfig(recompute_ratio=1.0))
    assert float((fused.logits - fusor.prefill(ids).logits).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gemma4_text", "mimo_v2_flash", "mllama_text_model"])
def test_geometry_of_a_config(family: str, tmp_path: Path) -> None:
    """A config alone tells the shapes that are stored, also where layers keep nothing or are of different shapes."""
    fusor = fusor_of(family)
    fusor.model.config.save_pretrained(tmp_path)
    own = kv_geometry(read_config(str(tmp_path)), torch.device("cpu"), torch.float32)
    assert replace(own, shared=fusor.decoder.geometry.shared) == fusor.decoder.geometry


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "deepseek_v3", "gpt_oss", "gemma4_text"])
def test_half_precision(family: str) -> None:
    """In bfloat16 ratio 1.0 stays within the model's own rounding, and the rotations found are those of float32."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    fusor, plain, ids = Fusor(tiny_model(family, torch.bfloat16)), fusor_of(family), draw_ids(60, 1)
    full = fusor.prefill(ids).logits
    rounding = float((full - plain.prefill(ids).logits).abs().max())
    stored = Segment(ids[10:40], fusor.precompute(ids[10:40]))
    fused = fusor.fuse([Segment(ids[:10]), stored, Segment(ids[40:])], FusionConfig(recompute_ratio=1.0)).logits
    assert float((full - fused).abs().max()) <= 2 * rounding
    kinds = [[own.rotation and own.rotation.scale_D is not None for own in each.decoder.anatomy] for each in (fusor, plain)]
    assert kinds[0] == kinds[1]


def rag_prompt(fusor: Fusor) -> list[Segment]:
    parts = [draw_ids(tokens, seed) for seed, tokens in enumerate((5, 30, 25, 9), start=1)]
    return [Segment(part, fusor.precompute(part) if 0 < index < 3 else None) for index, part in enumerate(parts)]


class Replay(DynamicCache):
    """A cache that holds, of every layer, what a blend's layer held: fresh KV where it was projected, else a chunk's own.

    A chunk's own KV is the model's, of a forward of the chunk alone at the positions where it stands: nothing of the store, the
    rotation or the layer passes is in it.
    """

    def __init__(self, model: Any, segments: list[Segment], fused: FusionResult) -> None:
        super().__init__()
        self._fresh, self._own, start = fused.projected, list[tuple[int, int, Any]](), 0
        for segment in segments:
            stop = start + len(segment.token_ids)
            if segment.kv is not None:
                ids, positions = torch.tensor([segment.token_ids]), torch.arange(start, stop)[None]
                own = model(ids, position_ids=positions, past_key_values=DynamicCache(), use_cache=True).past_key_values
                self._own.append((start, stop, own.layers))
            start = stop

    def update(self, one: Any, other: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        pair = super().update(one, other, layer_idx, *more, **named)
        for start, stop, layers in self._own:
            stale = ~torch.isin(torch.arange(start, stop), self._fresh[layer_idx])
            for x, own in zip(pair, (layers[layer_idx].keys, layers[layer_idx].values), strict=True):
                x[:, :, start:stop][:, :, stale] = own[:, :, stale]
        return pair


@pytest.mark.parametrize("selector", ["question_attention", "gradual"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equals_a_dense_replay(kind: str, selector: str) -> None:
    """The model's own dense forward, over a cache with the blend's fresh and stored KV, has the blend's logits and cache."""
    fusor = fusor_of(KINDS[kind])
    segments = rag_prompt(fusor)
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=0.4, selector=selector))
    cache = Replay(fusor.model, segments, fused)
    logits = fusor.model(torch.tensor([fused.token_ids]), past_key_values=cache, use_cache=True).logits[0, -1]
    assert float((logits - fused.logits).abs().max()) <= 1e-4 * max(1.0, float(logits.abs().max()))
    assert 0 < fused.recomputed_ratio < 1
    for mine, dense in zip(fused.cache.layers, cache.layers, strict=False):
        if mine.keys is not None and not mine.is_sliding:
            torch.testing.assert_close(mine.keys, dense.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, dense.values, rtol=1e-4, atol=1e-4)


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    scores_of = layer_passes.scores_of
    patch.setattr(layer_passes, "scores_of", lambda q, kw: scores_of(q, {**kw, "s_aux": None}))


def every_layer_rotates(patch: pytest.MonkeyPatch) -> None:
    turned = anatomy.Rotation(anatomy._halves, 0, 16)
    patch.setattr(LayerAnatomy, "rotate", lambda _, k, cos_sin: turned(k, *cos_sin))


def nothing_is_rotated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerAnatomy, "rotate", lambda _, k, *__, **___: k)


def norms_before_the_projection(patch: pytest.MonkeyPatch) -> None:
    project = decoder.Decoder.project_kv
    patch.setattr(
        decoder.Decoder,
        "project_kv",
        lambda self, layer, hidden: project(self, layer, torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])),
    )


def keys_are_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerAnatomy, "unpack", lambda _, k, __: (k, k))


def no_scale_after_rotation(patch: pytest.MonkeyPatch) -> None:
    def turn(self: Any, x: Any, cos: Any, sin: Any) -> Any:
        return self.turn(x, cos, sin)

    patch.setattr(anatomy.Rotation, "__call__", turn)


def halves_are_swapped(patch: pytest.MonkeyPatch) -> None:
    unpack = LayerAnatomy.unpack
    patch.setattr(LayerAnatomy, "unpack", lambda self, k, v: unpack(self, v, k))


def another_layers_kv(patch: pytest.MonkeyPatch) -> None:
    run = decoder.Decoder.run_rows

    def run_rows(self: Any, layer: int, hidden: Any, rows: Any, cos_sin: Any, layer_kv: Any, *, scatter: bool) -> Any:
        if layer >= self.geometry.layers:
            layer_kv.k_1HND.zero_()
        return run(self, layer, hidden, rows, cos_sin, layer_kv, scatter=scatter)

    patch.setattr(decoder.Decoder, "run_rows", run_rows)


def chunks_are_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "ChunkWindow", int)


def rows_are_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_passes.CachePass, "get_seq_length", lambda *_: 0)


def one_shape_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVGeometry, "heads", lambda self, _: (self.kv_heads, self.head_dim))


def one_hidden_state_for_all(patch: pytest.MonkeyPatch) -> None:
    hidden = decoder.Decoder._hidden
    patch.setattr(decoder.Decoder, "_hidden", lambda self, state: hidden(self, state)[:1].expand(self._parallel, -1, -1, -1))


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "sinks left out": ("gpt_oss", without_sinks),
    "a layer without rotary embedding rotated": ("smollm3", every_layer_rotates),
    "keys not rotated": ("olmo3", nothing_is_rotated),
    "a norm before the projection": ("olmo3", norms_before_the_projection),
    "a norm's weight after the rotation left out": ("hunyuan_v1_dense", no_scale_after_rotation),
    "chunked attention run as a sliding window": ("llama4_text", chunks_are_windows),
    "scores scaled by a row's number": ("llama4_text", rows_are_positions),
    "one shape for all layers": ("gemma4_text", one_shape_for_all),
    "position keys of a latent not rotated": ("deepseek_v3", nothing_is_rotated),
    "halves of a latent swapped": ("deepseek_v3", halves_are_swapped),
    "values read as keys": ("gemma4_text", keys_are_values),
    "shared KV of another layer": ("gemma4_text", another_layers_kv),
    "parallel hidden states mixed up": ("gemma3n_text", one_hidden_state_for_all),
    "keys and values of different sizes swapped": ("mimo_v2_flash", halves_are_swapped),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a runner could get wrong about each kind of layer, the check against the model's own forward finds."""
    family, plant = FAULTS[fault]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    assert verdict(family).reason == ""
    plant(monkeypatch)
    try:
        reason = verdict(family).reason
    except RuntimeError as error:  # shapes that do not fit
        reason = str(error)
    assert re.search(r"off by|size of tensor|shape|expanded size|greedy tokens|precompute it with|not turned by", reason), (
        reason
    )
