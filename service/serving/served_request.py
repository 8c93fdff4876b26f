"""A request from its submission to its answer: it waits, is prefilled layer by layer, decodes token by token, and ends."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from cacheblend.blend import NextToken, SequenceKV
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prefill import PrefillSteps
from cacheblend.service.engine.request import Answer, Request

from .sampling import Draws, Sampling, TokenLogprob
from .text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Piece:
    """A token was drawn.

    Args:
        token_id: the token.
        text: text that became certain with it; it may be empty.
        logprob: of the token, if the request asked for log-probabilities.
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The request is answered.

    Args:
        answer: the answer; TTFT and prefill in its timings include the time in the queue.
        finish_reason: "stop" (end of sequence or a stop string) or "length".
        last_text: text that was held back until now.
        queue_s: seconds that the request waited before its prefill began.
        logprobs: of each token, if the request asked for them.
        deviation_N: each prompt token's KV deviation where it was measured (paper §4.1), 0 elsewhere.
    """

    answer: Answer
    finish_reason: str
    last_text: str
    queue_s: float
    logprobs: tuple[TokenLogprob, ...]
    deviation_N: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer."""

    error: Exception


Event = Piece | Done | Failed


class ServedRequest:
    """A prepared request in the scheduler.

    A client's thread makes and cancels it; the scheduler's thread calls everything else. `end` frees what the request holds, in
    every state.

    Args:
        engine: has its documents and stored KV; engines of one scheduler share their model.
        prepared: the request as `engine.prepare` returned it. A full recompute replaces it if the quality guard says so, and a
            copy of its leader's replaces a follower's.
        deliver: called from the scheduler's thread with every event, in order. The last event is `Done` or `Failed`; a
            cancelled request has neither. Must return at once.
        tenant: who asks; tenants take turns.
        sampling: how tokens are drawn, beside the sampling options of `prepared`; None changes nothing.
        stop: strings that end the answer.
        arrived: `time.perf_counter` when the request came, from which its deadline counts; None for now.
        own_ratio: whether the caller chose the recompute ratio; the quality guard neither checks nor changes such a request.
        leader: an earlier request of the same prompt: while it decodes, its prefill serves this request too.

    Attributes:
        sampled: whether the prompt's KV outlives the request, for a shadow evaluation.
        submitted, begun: `time.perf_counter` when it was made, and when its prefill began.
    """

    def __init__(
        self,
        engine: Engine,
        prepared: Request,
        deliver: Callable[[Event], None],
        *,
        tenant: str = "",
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        own_ratio: bool = False,
        arrived: float | None = None,
        leader: ServedRequest | None = None,
    ) -> None:
        self.engine, self.prepared, self.deliver = engine, prepared, deliver
        self.tenant, self.own_ratio = tenant, own_ratio
        self.sampled = False
        self.submitted = self.begun = time.perf_counter()
        self.arrived = self.submitted if arrived is None else arrived
        self._sampling, self._stop = sampling or Sampling(), tuple(stop)
        self._leader = leader
        self._owner = self  # of the prompt's KV
        self._followers = 0  # that wait for this one's prefill
        if leader is not None:
            leader._followers += 1
        self._logprobs: list[TokenLogprob] = []
        self._cancelled = threading.Event()
        self._held = ExitStack()
        self._tokens: NextToken | None = None
        self._kv: SequenceKV | None = None
        self._answered = False

    def cancel(self) -> None:
        """Give the request up: its next step frees what it holds, and no more events come."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    @property
    def is_prefilled(self) -> bool:
        """Whether it decodes."""
        return self._tokens is not None

    @property
    def kv(self) -> SequenceKV:
        """Its sequence's KV, while it decodes."""
        assert self._kv is not None
        return self._kv

    @property
    def last_token(self) -> int:
        """The token that the next step of the batch appends."""
        return self.prepared.token_ids[-1]

    @property
    def is_follower(self) -> bool:
        """Whether it shares the prompt of an earlier request."""
        return self._leader is not None

    def begin(self) -> None:
        """Begin the prefill; a follower of a request that decodes has nothing to prefill."""
        self.begun = time.perf_counter()
        self._held.enter_context(self.engine.foreground)
        leader = self._leader
        if leader is not None and leader._kv is not None:
            self.prepared, self.sampled = copy.copy(leader.prepared), False
            self.prepared.prefix, self.prepared.first_token = None, 0.0
            self._owner, self._layers = leader, _no_layers()
        else:
            self._layers = self.engine.prefill_steps(self.prepared)
        self._held.callback(self._layers.close)
        self._text = TextStream(self.engine.fusor.tokenizer, self._stop)

    def prefill_layer(self) -> bool:
        """Run the next layer; after the last layer draw the first token. True if the answer is complete with that."""
        try:
            next(self._layers)
        except StopIteration:
            return self._begin_decoding()
        return False

    def decode(self, logits_V: torch.Tensor) -> bool:
        """Draw the next token from a batch's logits, now that the last token has its KV. True if the answer is complete."""
        if self.prepared.prefix is not None:
            self.prepared.prefix.append(self.last_token, lambda layer, tokens: self.kv.layers[layer].last(tokens))
        return self._draw(logits_V)

    def finish(self) -> Done:
        """End the answer, and return it."""
        assert self._tokens is not None
        run = self.prepared
        if run.prefix is not None:
            run.prefix.commit_prompt()  # an answer of one token has appended none
        held_back = self._text.finish()
        run.text, run.ended = self._text.text, time.perf_counter()
        self._answered = True
        reason = "stop" if self._text.stopped else self._tokens.finish_reason
        assert reason is not None
        queue_s = self.begun - self.submitted
        return Done(run.answer(), reason, held_back, queue_s, tuple(self._logprobs), run.fused.deviation)

    def end(self) -> None:
        """Stop loading, release pins, and drop the KV; a sampled request that is answered keeps its prompt's KV."""
        self._held.close()
        self._kv = None
        if not (self.sampled and self._answered):
            self.prepared.release()

    def _begin_decoding(self) -> bool:
        run, fused = self.prepared, self.prepared.fused
        options = self._sampling.generation_options(run.sampling)
        self._tokens = NextToken(self.engine.fusor.model, fused.token_ids, run.max_tokens, self._sampling.seed, **options)
        self._draws = Draws(self._sampling, fused.logits.device)
        run.token_ids = self._tokens.token_ids
        is_complete = self._draw(fused.logits)
        if not is_complete:
            self._kv = SequenceKV(fused, self.engine.fusor.decoder.windows)
        if self._leader is not None:
            self._leader._followers -= 1
        if not self._owner.sampled and not self._owner._followers:  # only the sequences use the prompt's KV from now on
            fused.take_memory()
            fused.cache.layers.clear()
        return is_complete

    def _draw(self, logits_V: torch.Tensor) -> bool:
        assert self._tokens is not None
        first = not self.prepared.token_ids
        token_id = self._tokens.draw(self._draws.adjust(logits_V))
        logprob = self._draws.accept(token_id, logits_V)
        if first:
            self.prepared.first_token = time.perf_counter()
        if logprob is not None:
            self._logprobs.append(logprob)
        self.deliver(Piece(token_id, self._text.add(token_id), logprob))
        return self._text.stopped or self._tokens.finish_reason is not None


def _no_layers() -> PrefillSteps:
    """The steps of a prompt that is prefilled."""
    yield from ()
