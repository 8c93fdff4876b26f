"""The reader's network: a small Llama, and how its weights start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.base.errors import ConfigError

from . import lesson


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Size of the reader.

    Attributes:
        width: hidden size, a multiple of `heads`.
        mlp_width: inner size of the MLP; small, because reading is attention's work.
        layers: decoder layers, at least 8 for a reader that ships: blending saves nothing in the first two.
        heads: attention heads, as many for keys as for queries.
        positions: the longest context in tokens.
        rope_theta: base of the rotary embedding.
    """

    width: int = 192
    mlp_width: int = 512
    layers: int = 8
    heads: int = 6
    positions: int = 4096
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for field in ("width", "mlp_width", "layers", "heads", "positions"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError("width", self.width, f"a multiple of {2 * self.heads}, for {self.heads} heads of even size")


def grow(shallow: LlamaForCausalLM, config: NetworkConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A network of `config.layers` layers that computes what `shallow` does: its layers, spread out evenly, and fresh ones
    between them that write nothing yet (their output projections are 0).
    """
    deep = make_network(config, tokenizer, seed)
    old_layers, new_layers = shallow.model.layers, deep.model.layers
    places = {(index * len(new_layers)) // len(old_layers): index for index in range(len(old_layers))}
    with torch.no_grad():
        deep.model.embed_tokens.weight.copy_(shallow.model.embed_tokens.weight)
        deep.model.norm.weight.copy_(shallow.model.norm.weight)
        for place, layer in enumerate(new_layers):
            if place in places:
                layer.load_state_dict(old_layers[places[place]].state_dict())
            else:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return deep


def make_network(config: NetworkConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A fresh network, the same for the same arguments on one machine.

    Matrices start at 1 / sqrt(fan-in), the two that write to the residual stream smaller by sqrt(2 x layers). The embedding,
    tied to the output, starts at 1 and the last norm at 1 / sqrt(width): so a token's identity is as loud in the residual
    stream as what the layers add to it, and can be copied to the answer, while logits start at the usual size.
    """
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    llama._attn_implementation = lesson.NAME
    network = LlamaForCausalLM(llama)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                spread = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    spread /= (2 * config.layers) ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        network.model.norm.weight.fill_(config.width**-0.5)
    return network
