"""What tests ask of a vLLM engine over a tiny random model; imports vLLM when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 400
BLOCK = 32  # the smallest that the CPU build takes
MakeModel = Callable[..., Path]
OpenServed = Callable[..., Any]


@dataclass
class Served:
    """vLLM's engine, and what it is asked by a test."""

    llm: Any
    store: Path

    def ask(
        self,
        tokens: Sequence[int],
        chunks: Sequence[Sequence[int]] | None = None,
        *,
        ratio: float | None = None,
        new_tokens: int = 6,
        documents: Sequence[int] = (),
    ) -> Any:
        """The engine's `RequestOutput` of a prompt, marked where chunks are given."""
        return self.ask_all([(tokens, chunks)], ratio=ratio, new_tokens=new_tokens, documents=documents)[0]

    def ask_all(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[Sequence[int]] | None]],
        *,
        ratio: float | None = None,
        new_tokens: int = 6,
        documents: Sequence[int] = (),
    ) -> list[Any]:
        """The same of several at once."""
        from vllm import SamplingParams

        def params(chunks: Sequence[Sequence[int]] | None) -> Any:
            marks = {"chunks": chunks, "ratio": ratio, "documents": list(documents)}
            extra = {} if chunks is None else {"kv_transfer_params": {"cacheblend": marks}}
            return SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=VOCAB, ignore_eos=True, extra_args=extra)

        every: list[Any] = self.llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens, _ in prompts],
            [params(chunks) for _, chunks in prompts],
            use_tqdm=False,
        )
        return every

    def precompute(self, *documents: Sequence[Sequence[int]]) -> None:
        """Store the KV of documents' chunks, through the running engine."""
        plain = [[[int(token) for token in chunk] for chunk in document] for document in documents]
        self.llm.collective_rpc("cacheblend_precompute", args=(plain, None, None))
        self.connector._worker._store.flush()

    @property
    def connector(self) -> Any:
        """The worker's."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def scheduler(self) -> Any:
        """The engine's."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def free_blocks(self) -> int:
        """Pages that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def first_logprobs(output: Any) -> torch.Tensor:
    """Log probabilities (V,) of the first generated token."""
    found = output.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in range(VOCAB)])
