"""A request that holds the model: its prefill, layer by layer, then its tokens."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from cacheblend.blend import NextToken, SequenceKV

from .request import Done, Piece
from .shadow import GuardedRequest
from .text_stream import TextStream


class RunningRequest:
    """Takes one step after another in the scheduler's thread; `close` frees all it holds, whatever state it is in."""

    def __init__(self, guarded: GuardedRequest) -> None:
        self.guarded, self.request, self.prepared = guarded, guarded.request, guarded.prepared
        request = guarded.request
        self._started = time.perf_counter()
        self._held = ExitStack()
        self._held.enter_context(request.engine.foreground)
        self._steps = request.engine.prefill_steps(guarded.prepared)
        self._held.callback(self._steps.close)
        self._text = TextStream(request.engine.fusor.tokenizer, request.stop)
        self._tokens: NextToken | None = None
        self._answered = False
        self.prefill_s = 0.0

    @property
    def is_prefilled(self) -> bool:
        """Whether it decodes."""
        return self._tokens is not None

    def prefill_layer(self) -> bool:
        """Run the next layer of the prefill; after the last one, draw the first token. True when the answer is complete."""
        began = time.perf_counter()
        try:
            next(self._steps)
        except StopIteration:
            self._begin()
        finally:
            self.prefill_s += time.perf_counter() - began
        if not self.is_prefilled:
            return False
        fused = self.prepared.fused
        is_complete = self._draw(fused.logits)
        if not is_complete:
            self.kv = SequenceKV(fused, self.request.engine.fusor.decoder.windows)
        if not self.guarded.sampled:  # nobody else wants it, so it goes when the sequence ends, or has outgrown its room
            fused.take_memory()
            fused.cache.layers.clear()
        return is_complete

    @property
    def last_token(self) -> int:
        """The token that the next step of the batch appends."""
        return self.prepared.token_ids[-1]

    def take(self, logits_V: torch.Tensor) -> bool:
        """Draw the next token from a batch's logits; the last one's KV has come. True when the answer is complete."""
        if self.prepared.prefix is not None:
            self.prepared.prefix.append(self.last_token, lambda layer, tokens: self.kv.layers[layer].last(tokens))
        return self._draw(logits_V)

    def done(self) -> Done:
        """The whole answer."""
        assert self._tokens is not None
        prepared = self.prepared
        if prepared.prefix is not None:
            prepared.prefix.commit_prompt()  # an answer of one token has appended none
        rest = self._text.finish()
        prepared.text, prepared.ended = self._text.text, time.perf_counter()
        self._answered = True
        reason = "stop" if self._text.stopped else self._tokens.finish_reason
        assert reason is not None
        return Done(prepared.answer(), reason, rest, self._started - self.request.submitted, prepared.fused.deviation)

    def close(self) -> None:
        """Stop loading, release pins, drop the KV."""
        self._held.close()
        if not (self.guarded.sampled and self._answered):
            self.prepared.release()

    def _begin(self) -> None:
        prepared, model = self.prepared, self.request.engine.fusor.model
        self._tokens = NextToken(model, prepared.fused.token_ids, prepared.max_tokens, self.request.seed, **prepared.sampling)
        prepared.token_ids = self._tokens.token_ids

    def _draw(self, logits_V: torch.Tensor) -> bool:
        assert self._tokens is not None
        first = not self.prepared.token_ids
        token_id = self._tokens.draw(logits_V)
        if first:
            self.prepared.first_token = time.perf_counter()
        piece = self._text.add(token_id)
        self.request.deliver(Piece(token_id, piece))
        return self._text.stopped or self._tokens.finish_reason is not None
