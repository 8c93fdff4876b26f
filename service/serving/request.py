"""A request from its submission to its answer: it waits, is prefilled layer by layer, decodes token by token, and ends."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend.blend import NextToken, SequenceKV
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prefill import PrefillSteps
from cacheblend.service.engine.request import Answer, Request

from .sampling import Draws, Sampling, TokenLogprob

UNFINISHED = "\ufffd"  # what a tokenizer gives for the first bytes of a character


@dataclass(frozen=True, slots=True)
class Piece:
    """A token was drawn; `text` is what became certain with it, perhaps nothing; `logprob` where that was asked for."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The request is answered.

    Args:
        answer: the whole answer; in its timings TTFT and prefill include the time in the queue and the turns of others.
        finish_reason: "stop" (end of sequence or a stop string) or "length".
        rest: text that was held back until now.
        queue_s: seconds that the request waited before its prefill began.
        logprobs: of each token, where they were asked for.
        deviation_N: each prompt token's KV deviation where it was measured (paper §4.1), 0 elsewhere.
    """

    answer: Answer
    finish_reason: str
    rest: str
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

    A client's thread makes and cancels it; all else belongs to the scheduler's thread. `end` frees all it holds, in whatever
    state it is.

    Args:
        engine: whose documents and stored KV it uses; engines of one scheduler share their model.
        prepared: what `engine.prepare` gave.
        deliver: called from the scheduler's thread with every event, in order; `Done` or `Failed` is the last, unless the
            request was cancelled. Must return at once.
        tenant: who asks; tenants take turns.
        cache_salt: the salt that it was prepared with; salts of a tenant take turns.
        sampling: how tokens are drawn, beside what `prepared` says; None for no more than that.
        stop: strings that end the answer.
        arrived: seconds of `time.perf_counter`, when it came, which its deadline counts from; None for now.
        own_ratio: the caller chose the recompute ratio, so the quality guard neither raises it nor judges by the answer.
        leader: a request of the same prompt that was submitted before: while it decodes, its prefill is this one's too.
        trace_parent: the caller's trace, as W3C's `traceparent` header has it; empty for none.

    Attributes:
        as_run: `prepared`, or the same with the ratio that the quality guard has raised.
        level: the guard's level that it runs at; see `QualityGuard`.
        sampled: its prompt's KV outlives it, for a shadow evaluation.
        prefill_s: seconds that its layers took on the device; the scheduler adds them up.
    """

    def __init__(
        self,
        engine: Engine,
        prepared: Request,
        deliver: Callable[[Event], None],
        *,
        tenant: str = "",
        cache_salt: str = "",
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        own_ratio: bool = False,
        arrived: float | None = None,
        leader: ServedRequest | None = None,
        trace_parent: str = "",
    ) -> None:
        self.engine, self.prepared, self.deliver = engine, prepared, deliver
        self.tenant, self.cache_salt, self.own_ratio = tenant, cache_salt, own_ratio
        self.as_run, self.level, self.sampled = prepared, 0.0, False
        self.prefill_s = 0.0
        self.submitted = time.perf_counter()
        self.arrived = self.submitted if arrived is None else arrived
        self._sampling, self._stop = sampling or Sampling(), tuple(stop)
        self._leader, self.trace_parent = leader, trace_parent
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
        """Nobody waits for the answer any more: its next step frees all it holds, and no more events come."""
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
        return self.as_run.token_ids[-1]

    @property
    def is_follower(self) -> bool:
        """Whether its prompt is another request's too, which comes before it."""
        return self._leader is not None

    def begin(self) -> None:
        """Waiting becomes prefilling; a follower of one that decodes has done that."""
        self._began = time.perf_counter()
        self._held.enter_context(self.engine.foreground)
        leader = self._leader
        if leader is not None and leader._kv is not None:
            self.as_run, self.sampled = copy.copy(leader.as_run), False
            self.as_run.prefix, self.as_run.first_token = None, 0.0
            self._owner, self._layers = leader, _no_layers()
        else:
            self._layers = self.engine.prefill_steps(self.as_run)
        self._held.callback(self._layers.close)
        self._text = TextStream(self.engine.fusor.tokenizer, self._stop)

    def prefill_layer(self) -> bool:
        """Run the next layer; after the last one, prefilling becomes decoding, with the first token. True where that is all."""
        try:
            next(self._layers)
            return False
        except StopIteration:
            fused = self.as_run.fused
        self._tokens = NextToken(
            self.engine.fusor.model,
            fused.token_ids,
            self.as_run.max_tokens,
            self._sampling.seed,
            **self._sampling.generation_options(self.as_run.sampling),
        )
        self._draws = Draws(self._sampling, fused.logits.device)
        self.as_run.token_ids = self._tokens.token_ids
        is_complete = self._draw(fused.logits)
        if not is_complete:
            self._kv = SequenceKV(fused, self.engine.fusor.decoder.windows)
        if self._leader is not None:
            self._leader._followers -= 1
        if (
            not self._owner.sampled and not self._owner._followers
        ):  # nobody else wants it: it ends with the sequences that have it
            fused.take_memory()
            fused.cache.layers.clear()
        return is_complete

    def decode(self, logits_V: torch.Tensor) -> bool:
        """Draw the next token from a batch's logits; the last one's KV has come. True where that is all."""
        if self.as_run.prefix is not None:
            self.as_run.prefix.append(self.last_token, lambda layer, tokens: self.kv.layers[layer].last(tokens))
        return self._draw(logits_V)

    def finish(self) -> Done:
        """The whole answer."""
        assert self._tokens is not None
        run = self.as_run
        if run.prefix is not None:
            run.prefix.commit_prompt()  # an answer of one token has appended none
        held_back = self._text.finish()
        run.text, run.ended = self._text.text, time.perf_counter()
        self._answered = True
        reason = "stop" if self._text.stopped else self._tokens.finish_reason
        assert reason is not None
        queue_s = self._began - self.submitted
        return Done(run.answer(), reason, held_back, queue_s, tuple(self._logprobs), run.fused.deviation)

    def end(self) -> None:
        """Stop loading, release pins, drop the KV; one that is sampled and answered keeps its prompt's."""
        self._held.close()
        self._kv = None
        if not (self.sampled and self._answered):
            self.as_run.release()

    def _draw(self, logits_V: torch.Tensor) -> bool:
        assert self._tokens is not None
        first = not self.as_run.token_ids
        token_id = self._tokens.draw(self._draws.adjust(logits_V))
        logprob = self._draws.accept(token_id, logits_V)
        if first:
            self.as_run.first_token = time.perf_counter()
        if logprob is not None:
            self._logprobs.append(logprob)
        self.deliver(Piece(token_id, self._text.add(token_id), logprob))
        return self._text.stopped or self._tokens.finish_reason is not None


def _no_layers() -> PrefillSteps:
    """The steps of a prompt that is prefilled."""
    yield from ()


class TextStream:
    """Decodes tokens one by one; ends before a stop string.

    A character whose bytes have not all come is held back, and so is what may be the start of a stop string.

    Args:
        tokenizer: the model's.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._token_ids: list[int] = []
        self._read_from = 0  # tokens before it are decoded for good, into `text`
        self._context_from = 0  # decoded along with the rest, since how a token reads depends on the one before
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain with this token."""
        self._token_ids.append(token_id)
        known = self._decode(self._token_ids[self._context_from : self._read_from])
        whole = self._decode(self._token_ids[self._context_from :])
        if len(whole) > len(known) and not whole.endswith(UNFINISHED):
            self.text += whole[len(known) :]
            self._context_from, self._read_from = self._read_from, len(self._token_ids)
        self._cut_at_stop()
        return self._give(0 if self.stopped else self._may_be_stop())

    def finish(self) -> str:
        """The rest, unfinished characters included."""
        if not self.stopped:
            known = self._decode(self._token_ids[self._context_from : self._read_from])
            self.text += self._decode(self._token_ids[self._context_from :])[len(known) :]
            self._context_from = self._read_from = len(self._token_ids)
            self._cut_at_stop()
        return self._give(0)

    def _cut_at_stop(self) -> None:
        found = [place for place in (self.text.find(stop, 0) for stop in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _may_be_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        ends = (size for size in range(min(longest, len(self.text)), 0, -1) if self._starts_stop(self.text[-size:]))
        return next(ends, 0)

    def _starts_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)

    def _give(self, held_back: int) -> str:
        upto = max(self._given, len(self.text) - held_back)
        piece, self._given = self.text[self._given : upto], upto
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
