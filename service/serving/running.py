"""A request that holds the model: its prefill, layer by layer, then its tokens."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from cacheblend.blend import NextToken, SequenceKV
from cacheblend.service.engine.prefill import Prefilled, StageTimes, assemble_answer

from .request import Done, Piece
from .shadow import GuardedRequest
from .text_stream import TextStream


class RunningRequest:
    """Takes one step after another in the scheduler's thread; `close` frees all it holds, whatever state it is in."""

    def __init__(self, guarded: GuardedRequest) -> None:
        self.guarded, self.request = guarded, guarded.request
        request = guarded.request
        self._started = time.perf_counter()
        self._held = ExitStack()
        self._held.enter_context(request.engine.foreground)
        self._steps = request.engine.prefill_steps(guarded.prepared, request.cache_salt)
        self._held.callback(self._steps.close)
        self._text = TextStream(request.engine.fusor.tokenizer, request.stop)
        self._prefilled: Prefilled | None = None
        self.prefill_s = 0.0

    @property
    def is_prefilled(self) -> bool:
        """Whether it decodes."""
        return self._prefilled is not None

    def prefill_layer(self) -> bool:
        """Run the next layer of the prefill; after the last one, draw the first token. True when the answer is complete."""
        began = time.perf_counter()
        try:
            next(self._steps)
        except StopIteration as done:
            self._begin(done.value)
        finally:
            self.prefill_s += time.perf_counter() - began
        if not self.is_prefilled:
            return False
        is_complete = self._draw(self._first_logits_V)
        fused = self.prefilled.fused
        if not is_complete:
            self.kv = SequenceKV(fused, self.request.engine.fusor.decoder.windows)
        if not self.guarded.sampled:  # nobody else wants it, so it goes when the sequence ends, or has outgrown its room
            fused.take_memory()
            fused.cache.layers.clear()
        return is_complete

    @property
    def prefilled(self) -> Prefilled:
        """How the prompt was prefilled; its cache and its memory are empty unless the request is sampled."""
        assert self._prefilled is not None
        return self._prefilled

    @property
    def last_token(self) -> int:
        """The token that the next step of the batch appends."""
        return self._tokens.token_ids[-1]

    def take(self, logits_V: torch.Tensor) -> bool:
        """Draw the next token from a batch's logits; the last one's KV has come. True when the answer is complete."""
        if self.prefilled.prefix is not None:
            self.prefilled.prefix.append(self.last_token, lambda layer, tokens: self.kv.layers[layer].last(tokens))
        return self._draw(logits_V)

    def done(self) -> Done:
        """The whole answer."""
        if self.prefilled.prefix is not None:
            self.prefilled.prefix.keep_prompt()  # an answer of one token has appended none
        rest = self._text.finish()
        times = StageTimes(prefill_done=self._prefill_done, first_token=self._first_token, ended=time.perf_counter())
        answer = assemble_answer(self.guarded.prepared, self.prefilled, self._tokens.token_ids, self._text.text, times)
        reason = "stop" if self._text.stopped else self._tokens.finish_reason
        assert reason is not None
        return Done(answer, reason, rest, self._started - self.request.submitted, self.prefilled.fused.deviation)

    def close(self) -> None:
        """Stop loading, release pins, drop the KV."""
        self._held.close()

    def _begin(self, prefilled: Prefilled) -> None:
        prepared, fusor = self.guarded.prepared, self.request.engine.fusor
        fused = prefilled.fused
        self._prefilled, self._prefill_done, self._first_logits_V = prefilled, time.perf_counter(), fused.logits
        self._tokens = NextToken(fusor.model, fused.token_ids, prepared.max_tokens, self.request.seed, **prepared.sampling)

    def _draw(self, logits_V: torch.Tensor) -> bool:
        first = not self._tokens.token_ids
        token_id = self._tokens.draw(logits_V)
        if first:
            self._first_token = time.perf_counter()
        piece = self._text.add(token_id)
        self.request.deliver(Piece(token_id, piece))
        return self._text.stopped or self._tokens.finish_reason is not None
