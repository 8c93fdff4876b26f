"""Which decoder families of transformers blend: a tiny random model of each through the project's own gate.

python scripts/model_families.py            # all of them, a line each
python scripts/model_families.py llama gemma4_text --seconds 20
"""

import argparse
import json
import re
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cacheblend.base.errors import CacheBlendError
from cacheblend.blend import FusionConfig, Fusor, Segment, SequenceKV
from cacheblend.blend.families import drops_softcap
from cacheblend.blend.fidelity import check_against_model

TOKENS, NEW_TOKENS = 120, 6
# Sizes of a tiny model, where a family's config has such a field and it is not None.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
ALTERNATE = ["sliding_attention", "full_attention"] * 3
PER_LAYER = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ALTERNATE,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
}
# What a family calls otherwise, or needs beside.
OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "deepseek_v2": LATENT | {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": PER_LAYER | {"laurel_rank": 8, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": PER_LAYER | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "granitemoehybrid": {"layer_types": ["attention"] * 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32)},
    "bailing_hybrid": LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "xlnet": {"d_head": 16},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1},
        **{"num_key_value_heads": 4, "adapter_rank": 8},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32},
        **{"indexer_compress_ratio": 4, "hc_lowrank": 16},
    },
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {"attention_chunk_size": 40, "floor_scale": 32, "attn_scale": 1.0},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [2]},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
    },
    "cohere_compass_text": {
        "layer_types": ALTERNATE[:4],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ALTERNATE[:2]},
    },
}


# Families that see images, whose decoder blends inside them.
WRAPPERS = ("gemma3", "gemma4", "glm4v", "idefics3", "internvl", "llama4", "llava", "mistral3")
WRAPPERS += ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
OWN |= dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text", "glm4v_text"), SECTIONS)
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a family's tiny model fared: `reason` is empty where it blends, at ratio 1.0 with the model's own logits.

    `special` is what its layers have that Llama's do not.
    """

    family: str
    reason: str
    logits_off: float = 0.0
    special: str = ""


def tiny_config(family: str, **changes: Any) -> Any:  # a config of transformers, of any class
    """A small config of a family; a wrapper's is its text model's."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).get_text_config(decoder=True)
    own = OWN.get(config.model_type, OWN.get(family, {}))
    sizes = {name: value for name, value in SIZES.items() if _value(config, name) is not None}
    if hasattr(type(config), "head_dim") and not isinstance(getattr(type(config), "head_dim", None), property):
        sizes["head_dim"] = SIZES["head_dim"]
    has_own_kinds = hasattr(type(config), "layers_block_type")
    if "layer_types" not in own and isinstance(_value(config, "layer_types"), list) and not has_own_kinds:
        sizes["layer_types"] = config.layer_types[: SIZES["num_hidden_layers"]]
    config = type(config)(**sizes | own | changes)
    if family == "dbrx":
        config.attn_config.clip_qkv = 8.0  # without it transformers' own forward fails
    return config


def tiny_wrapper_config(family: str) -> Any:  # a config of transformers, of any class
    """A small config of a family that sees images."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    vision = config.vision_config or AutoConfig.for_model(f"{family}_vision")
    sizes = {name: value for name, value in VISION.items() if hasattr(vision, name)}
    parts = {"text_config": tiny_config(family).to_dict(), "vision_config": type(vision)(**sizes).to_dict()}
    return type(config)(**parts, **({"audio_config": None} if hasattr(config, "audio_config") else {}))


def _value(config: Any, name: str) -> Any:
    if isinstance(getattr(type(config), name, None), property):
        return None  # it follows from other fields
    try:
        return getattr(config, name, None)
    except Exception:  # of a field that may differ between layers, an error of its own kind
        return True


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a family, or of a model type within one, with weights large enough that a fault shows."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(0)
    if family in WRAPPERS:
        model = transformers.AutoModelForImageTextToText.from_config(tiny_wrapper_config(family), dtype=dtype)
    else:
        config, names = tiny_config(family, **changes), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = getattr(transformers, names.get(family) or names[family.partition("_text")[0]])
        kind = kind if isinstance(config, kind.config_class) else transformers.AutoModelForCausalLM
        make = kind._from_config if hasattr(kind, "_from_config") else kind.from_config
        model = make(config, dtype=dtype)
    model.eval().requires_grad_(False)
    if drops_softcap(model):
        model.set_attn_implementation("eager")
    for parameter in model.get_decoder().parameters() if family in WRAPPERS else model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
        elif bool(parameter.any()):
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)  # norms' weights begin at one
        else:
            parameter.data.normal_(0, 0.5)  # sinks and biases begin at zero
    return model


def verdict(family: str) -> Verdict:
    """Blend a tiny model of a family, and compare with its own forward and its own greedy tokens."""
    try:
        fusor = Fusor(tiny_model(family), allow_unverified=True)
        check_against_model(fusor, family)
    except CacheBlendError as error:
        return Verdict(family, str(error))
    ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    parts = ids[:10], ids[10:60], ids[60:100], ids[100:]
    stored = [fusor.precompute(part) for part in parts[1:3]]
    segments = [Segment(parts[0]), *(Segment(part, kv) for part, kv in zip(parts[1:3], stored, strict=True)), Segment(parts[3])]
    full = fusor.prefill(ids)
    fused = [fusor.fuse(segments, FusionConfig(recompute_ratio=ratio)) for ratio in (1.0, 0.3, 0.0)]
    off = float((full.logits - fused[0].logits).abs().max())
    if not off <= 1e-4 * max(1.0, float(full.logits.abs().max())):
        return Verdict(family, f"its logits at ratio 1.0 are off by {off:.2g}", off)
    after = Segment(ids[100:-1], fusor.precompute(ids[100:-1], ids[:100]))  # behind a prefix that is computed once
    reused = fusor.fuse([Segment(ids[:100]), after, Segment(ids[-1:])], FusionConfig(recompute_ratio=0.0))
    off = max(off, float((full.logits - reused.logits).abs().max()))
    if not off <= 1e-4 * max(1.0, float(full.logits.abs().max())):
        return Verdict(family, f"its logits over a chunk behind its own prefix are off by {off:.2g}", off)
    model: Any = fusor.model
    own = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[
        0, TOKENS:
    ].tolist()
    kv, drawn = SequenceKV(fused[0], fusor.decoder.windows), [int(fused[0].logits.argmax())]
    while len(drawn) < NEW_TOKENS:
        drawn.append(int(fusor.decoder.decode(drawn[-1:], [kv])[0].argmax()))
    reason = "" if drawn == own else f"its greedy tokens after a blend are {drawn} and not {own}"
    return Verdict(family, reason, off, special(fusor))


def special(fusor: Fusor) -> str:
    """What the layers of a model have that Llama's do not."""
    geometry, layers = fusor.decoder.geometry, fusor.decoder.anatomy
    found = {
        "latent attention": any(not layer.caches_keys and layer.is_packed for layer in layers),
        "layers that read another's KV": bool(geometry.shared),
        "layers of different shapes": bool(geometry.heads_of_layers),
        "keys and values of different sizes": any(layer.caches_keys and layer.is_packed for layer in layers),
        "layers without rotation": any(layer.rotation is None for layer in layers),
        "a norm after the rotation": any(layer.rotation is not None and layer.rotation.scale_D is not None for layer in layers),
        "sinks": any(getattr(layer.attention, "sinks", None) is not None for layer in layers),
    }
    return ", ".join(name for name, is_so in found.items() if is_so)


def page(found: Iterable[Verdict]) -> str:
    """Tables for docs/models.md: the families that blend by what is special, and the others by why they do not."""
    blend, refused = dict[str, list[str]](), dict[str, list[str]]()
    for one in found:
        reason = re.sub(r"^.* models cannot be blended: | \(.*|, whose.*|: .*", "", one.reason)
        (refused if one.reason else blend).setdefault(reason or one.special, []).append(one.family)
    lines = ["| families that blend | special |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {kind or 'nothing'} |" for kind, names in blend.items()]
    lines += ["", "| families that do not | why |", "|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {reason} |" for reason, names in sorted(refused.items()))])


def verdicts(families: Iterable[str], seconds: int) -> Iterable[Verdict]:
    """Each family's verdict; one that takes too long or fails otherwise has that as its reason."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    for family in families:
        signal.alarm(seconds)
        try:
            yield verdict(family)
        except Exception as error:  # of the family's own code, with sizes that it was never meant for
            yield Verdict(family, f"no tiny model of it ran: {error.__cause__ or error}".splitlines()[0])
        finally:
            signal.alarm(0)


def main(arguments: list[str]) -> int:
    """The command; exits with 1 if a named family does not blend."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "families", nargs="*", help="names of families; all of transformers' decoders, and wrappers, without one"
    )
    parser.add_argument("--seconds", type=int, default=40, help="time for one family")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--page", action="store_true", help="the tables of docs/models.md")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    every = list[Verdict]()
    for found in verdicts(given.families or dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WRAPPERS]), given.seconds):
        every.append(found)
        if not given.page:
            print(json.dumps(asdict(found)) if given.json else f"{found.family:26} {found.reason or 'blends'}", flush=True)
    if given.page:
        print(page(every))
    blended = sum(not found.reason for found in every)
    print(f"{blended} of {len(every)} families blend", file=sys.stderr)
    return int(bool(given.families) and blended < len(every))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
