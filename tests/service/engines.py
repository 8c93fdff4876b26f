"""A tiny model directory with a tokenizer, documents, and what tests do to an engine."""

from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from fakes import tiny_tokenizer
from profiles import linear_profile
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.loader import describe_device, write_profile
from cacheblend.loader.profile import Profile
from cacheblend.retriever import Chunk, PlainTokenizer
from cacheblend.service import Answer, AnswerPlan, Engine
from cacheblend.service.engine.profiles import find_controller
from cacheblend.store import ChunkKey, context_digest

OpenEngine = Callable[..., Engine]
POSITIONS = 512
CHUNK_TOKENS = 24
TOP_K = 4
BROUGHT = [{"text": "brought along"}]
QUESTION = "What does the else clause of a while loop do?"
DOCUMENTS: list[dict[str, object]] = [
    {"id": name, "title": name, "text": topics[name][100:500]} for name in ("for", "while", "class", "if", "with")
]
# White space at its end and its start, a special token's text, several scripts.
ODD_DOCUMENTS: list[dict[str, object]] = [
    {"title": "odd", "text": "  </s> says <s> in the middle \n\n of things\t"},
    {"text": "注意力机制 and naïve café 🙂"},
]


def make_model(directory: Path, positions: int = POSITIONS, vocab: int = 600, **changes: Any) -> None:
    """Write a Llama whose q, k, v and o weights are scaled up, so that a fault in mask, rotation or cache shows."""
    tokenizer = tiny_tokenizer(vocab)
    changes = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": tokenizer.eos_token_id, **changes}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            **changes,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def ask(engine: Engine, method: str = "blend", **options: object) -> Answer:
    return engine.answer(QUESTION, method=method, **{"num_chunks": TOP_K, **options})


def profile_of(engine: Engine, **speeds: float) -> Profile:
    """A profile of the engine's model on this device, with made-up speeds."""
    geometry = engine.fusor.decoder.geometry
    return linear_profile(
        layers=geometry.layers,
        model=engine.fusor.fingerprint,
        device=describe_device(geometry.device),
        layer_token_bytes=geometry.layer_bytes(1),
        **speeds,
    )


def use_profile(engine: Engine, profile: Profile) -> None:
    """Have an engine plan with a profile from now on, as if it had found it when it opened."""
    write_profile(engine.config.profile_dir, profile)
    engine._prefiller.controller = find_controller(engine.config, engine.fusor)


def head_of(engine: Engine) -> tuple[int, ...]:
    """What every prompt of an engine without a chat template begins with: BOS and the instruction."""
    tokenizer = engine.fusor.tokenizer
    return (tokenizer.bos_token_id, *PlainTokenizer(tokenizer).ids(engine.config.instruction))


def key_of(engine: Engine, chunk: Chunk) -> ChunkKey:
    """An ingested chunk's key, made from what it is computed after: the head, and all of its short document before it.

    The tiny model has no room for a filler passage.
    """
    before = [other.token_ids for other in engine.retriever.chunks(chunk.document_id) if other.position < chunk.position]
    return ChunkKey.of(
        chunk.token_ids,
        prefix_ids=head_of(engine),
        context=context_digest((), before if engine.config.context_document_tokens else ()),
        model=engine.fusor.fingerprint,
        codec=engine.config.kv_cache_dtype,
    )


def prompt_of(plan: AnswerPlan) -> tuple[int, ...]:
    """A plan's whole prompt."""
    return tuple(token for segment in plan.segments for token in segment.token_ids)


def kinds(answer: Answer) -> list[str]:
    """Kinds of the plan's segments, in order."""
    return [segment.kind for segment in answer.plan.segments]


def furthest(one: Answer, other: Answer) -> float:
    """Largest difference between two answers' first logits."""
    return float((one.first_logits - other.first_logits).abs().max())


def entry_file(engine: Engine, key: ChunkKey) -> Path:
    """Where the store has written an entry."""
    return Path(engine.store.config.directory) / "entries" / str(key)[:2] / str(key)


def delete_kv(engine: Engine) -> None:
    """Delete every entry of the store; documents stay known."""
    for entry in engine.store.ls():
        engine.store.delete(entry.key)


def damage(engine: Engine, keys: Iterable[ChunkKey]) -> None:
    """Flip the lowest bit of the last byte of entries' files, which belongs to the last layer."""
    for key in keys:
        with entry_file(engine, key).open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
