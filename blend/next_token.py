"""One sequence's next token, drawn as `model.generate` draws it, where the forwards are not `generate`'s own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


class NextToken:
    """Draws a sequence's tokens with the model's own generation config: its processors, its sampling, its stopping.

    Args:
        model: the model that the logits are of.
        prompt_ids: what stands before the first token; some processors (repetition penalty) look at it.
        max_new_tokens: at most so many tokens.
        seed: of the sampling; None draws one.
        kwargs: what else `generate` takes: `do_sample`, `temperature`, `top_p`, ...
    """

    def __init__(
        self, model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, seed: int | None = None, **kwargs: Any
    ) -> None:
        generator: Any = model
        config, _ = generator._prepare_generation_config(None, max_new_tokens=max_new_tokens, **kwargs)
        if config.min_new_tokens is not None:
            config.min_length = config.min_new_tokens + len(prompt_ids)
        generator._prepare_special_tokens(config, True, device=model.device)
        self._processors = generator._get_logits_processor(config, input_ids_seq_length=len(prompt_ids), device=model.device)
        stop = config._eos_token_tensor
        self._stop_ids = frozenset() if stop is None else frozenset(stop.tolist())
        self._do_sample = bool(config.do_sample)
        self._prompt_ids, self._max_new_tokens = tuple(prompt_ids), max_new_tokens
        self._random = torch.Generator(device=model.device)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self.token_ids: list[int] = []

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token after float32 logits (V,); it is added to `token_ids`."""
        scores_1V = logits_V[None]
        if self._processors:
            ids_1N = torch.tensor([(*self._prompt_ids, *self.token_ids)], device=logits_V.device)
            scores_1V = self._processors(ids_1N, scores_1V.clone())
        if self._do_sample:
            token = int(torch.multinomial(torch.softmax(scores_1V, dim=-1), 1, generator=self._random))
        else:
            token = int(scores_1V.argmax())
        self.token_ids.append(token)
        return token

    @property
    def finish_reason(self) -> str | None:
        """`stop` after an end-of-sequence token, `length` where no more are allowed, None where it goes on."""
        if self.token_ids and self.token_ids[-1] in self._stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None
