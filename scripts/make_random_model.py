"""Make a Llama-shaped model with random weights and a real byte-level BPE tokenizer: demos and benchmarks need no network.

    python scripts/make_random_model.py OUT_DIR [--shape demo|bench] [--hidden 256 ...] [--json]

Its words mean nothing; its speed, memory and token counts are those of a trained model of that shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
SMALLEST_VOCAB = 256 + len((BOS, EOS))  # every byte, and the special tokens
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama; the defaults answer in a demo on two cores.

    Raises:
        ValueError: a size is not allowed.

    """

    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 768
    vocab: int = 8192
    max_positions: int = 32768

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} is not allowed: at least 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden} is not allowed: a multiple of 2 x heads = {2 * self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} is not allowed: a divisor of heads = {self.heads}")
        if self.vocab < SMALLEST_VOCAB:
            raise ValueError(f"vocab={self.vocab} is not allowed: at least {SMALLEST_VOCAB}, one token a byte")


SHAPES = {
    "demo": ModelShape(),
    "bench": ModelShape(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048),
}


def make_random_model(
    out_dir: Path,
    shape: ModelShape = SHAPES["demo"],
    seed: int = 0,
    *,
    chat_template: bool = False,
) -> dict[str, object]:
    """Write config, float32 weights, generation config and tokenizer to a folder that `from_pretrained` loads offline.

    Args:
        out_dir: made when missing; files of the same names are overwritten.
        shape: the model's sizes; the tokenizer has exactly `vocab` tokens.
        seed: of the weights; the same seed and shape give the same files.
        chat_template: give the tokenizer a simple one.

    Returns:
        What was made: directory, parameters, bytes of weights, seed and shape.

    Raises:
        ValueError: Python's help is too small for so many tokens.

    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(python_help(), shape)
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        dtype="float32",
        random_weights=True,  # evaluations read it, and report no quality
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        do_sample=False,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"directory": str(out_dir), "parameters": parameters, "weight_bytes": 4 * parameters, "seed": seed, **asdict(shape)}


def train_tokenizer(corpus: Iterable[str], shape: ModelShape) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `shape.vocab` tokens; decoding what it encoded gives any text back.

    Raises:
        ValueError: the corpus is too small for so many tokens.

    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if (size := tokenizer.get_vocab_size()) < shape.vocab:
        raise ValueError(f"the corpus is enough for {size} tokens, not {shape.vocab}: give more text or a smaller vocab")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=shape.max_positions,
        clean_up_tokenization_spaces=False,
    )


def python_help() -> list[str]:
    """Half a million characters of English that every Python carries: the texts of `help()`."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make a Llama-shaped model with random weights and a real tokenizer.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo", help="sizes to start from (default: %(default)s)")
    for field in fields(ModelShape):
        sizes = ", ".join(f"{name} {getattr(shape, field.name)}" for name, shape in SHAPES.items())
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=f"in place of the shape's: {sizes}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--chat-template", action="store_true", help="give the tokenizer a simple chat template")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    sizes = {field.name: getattr(options, field.name) for field in fields(ModelShape)}
    try:
        shape = replace(SHAPES[options.shape], **{name: size for name, size in sizes.items() if size is not None})
        if options.out_dir.exists() and not options.out_dir.is_dir():
            raise ValueError(f"{options.out_dir} is a file; choose a folder")
        if options.out_dir.exists() and any(options.out_dir.iterdir()) and not options.force:
            raise ValueError(f"{options.out_dir} is not empty; choose another folder, or --force to overwrite files in it")
        made = make_random_model(options.out_dir, shape, options.seed, chat_template=options.chat_template)
    except (ValueError, OSError) as error:
        print(f"make_random_model: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(made))
    else:
        print(f"{made['directory']}: {made['parameters']:,} parameters, {options.shape} shape, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
