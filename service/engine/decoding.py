"""Decoding of one sequence: how its tokens are drawn, which text they have, and their log-probabilities.

Shapes: V words of the vocabulary.
"""

import codecs
import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_share, check_whole, is_number, is_whole
from cacheblend.blend import FusionResult, Fusor, NextToken, SequenceKV

from .grammar import Grammar
from .reasoning import ThoughtReader, Thoughts

LEAST_TEMPERATURE = 1e-5  # logits over less leave float32's range, and the likeliest token is drawn anyway
UNFINISHED = "\ufffd"  # how a tokenizer decodes the first bytes of a character
MAX_UNDECODED = 16  # tokens; a character has at most 4 bytes, so more of them are no character that is still to come
SETTLED_TOKENS = 4  # after so many more tokens a character is complete, or never will be


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are drawn and decoded; by default the likeliest token is drawn.

    Args:
        temperature: 0 is greedy; above, tokens are sampled.
        top_p: sample from the likeliest tokens of this total probability; 0 is greedy.
        top_k: sample from so many likeliest tokens; 0 or -1 for all.
        min_p: tokens less likely than this share of the likeliest token's probability are not drawn; None for the model's own.
        min_tokens: nothing ends the answer before so many; JSON ends where it is complete.
        ignore_eos: no token ends the answer.
        seed: of the draws; None draws one.
        presence_penalty: subtracted from the logit of each token that the answer contains.
        frequency_penalty: subtracted from a token's logit for each time that the answer contains it.
        repetition_penalty: divides the logits of tokens that prompt or answer contain (multiplies them below 0); 1 for none,
            None for the model's own.
        logit_bias: added to tokens' logits.
        logprobs: how many of the likeliest tokens are reported with each token; None reports none.
        grammar: of the answer; None for any text.
        stop: strings that end the answer.
        thoughts: how the answer has its thoughts; None makes them a part of its text.
        continues: the answer goes on with the prompt's text: with a space where its first token has one, which some tokenizers
            drop of a text's first.

    Raises:
        ConfigError: a temperature, top_p, top_k or seed outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: Grammar | None = None
    stop: Sequence[str] = ()
    thoughts: Thoughts | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise ConfigError("temperature", self.temperature, "0 (greedy) or above")
        check_share("top_p", self.top_p)
        check_whole("top_k", self.top_k, at_least=-1)
        if self.seed is not None and not (is_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            raise ConfigError("seed", self.seed, "an integer of 64 bits")

    def generation_options(self, tokenizer: Any) -> dict[str, Any]:
        """The options that `generate` knows, for a model with this tokenizer."""
        padding = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None)
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if (temperature := float(self.temperature)) >= LEAST_TEMPERATURE:
            options = {"do_sample": True, "temperature": temperature, "top_p": self.top_p, "top_k": max(0, self.top_k)}
            if self.min_p is not None:
                options["min_p"] = self.min_p
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = float(self.repetition_penalty)
        if (least := sys.maxsize if self.ignore_eos else self.min_tokens) and self.grammar is None:
            options["min_new_tokens"] = least
        return {"pad_token_id": int(next(padding, 0)), **options}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log-probability under the model, before any option, and those of the likeliest tokens."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A token was drawn.

    Args:
        token_id: the token.
        text: text that became certain with it; it may be empty.
        logprob: of the token, if the request asked for log-probabilities.
        thoughts: of a reasoning model, which are no part of `text`.
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    thoughts: str = ""


class Decoding:
    """The tokens of one sequence, drawn one by one.

    Args:
        fusor: the model.
        fused: the prompt; its cache is not changed.
        sampling: how tokens are drawn and decoded.
        max_tokens: most tokens to draw.

    Attributes:
        kv: of the sequence; None before the first token, and after the last.
        said: the text so far.
        thoughts: those before the text, so far.
        first_token: `time.perf_counter` when the first token was on the host.
        logprobs: of each token, if they are asked for.
    """

    def __init__(self, fusor: Fusor, fused: FusionResult, sampling: Sampling, max_tokens: int) -> None:
        device, tokenizer, thoughts = fused.logits.device, fusor.tokenizer, sampling.thoughts
        options = sampling.generation_options(tokenizer)
        self._next = NextToken(fusor.model, fused.token_ids, max_tokens, sampling.seed, **options)
        self._sampling, self._counts = sampling, Counter[int]()
        self._matcher = None if sampling.grammar is None else sampling.grammar.matcher()
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self.kv: SequenceKV | None = None
        hidden = None if thoughts is None else thoughts.hidden
        lasts = (fused.token_ids[-size:] for size in range(1, 5)) if sampling.continues else ()  # a character has 4 bytes
        context = next((ids for ids in lasts if UNFINISHED not in tokenizer.decode(ids)), ())
        self._text = TextStream(tokenizer, sampling.stop, hidden, sampling.min_tokens, context)
        self._reader = None if thoughts is None else ThoughtReader(thoughts)
        self.said, self.thoughts, self.first_token = "", "", 0.0
        self.logprobs: list[TokenLogprob] = []

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self._next.token_ids

    @property
    def finish_reason(self) -> str | None:
        """Either "stop" (end of sequence or a stop string) or "length"; None while the answer goes on."""
        return "stop" if self.stop_string is not None else self._next.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._text.stop_string

    def draw(self, logits_V: torch.Tensor) -> Piece:
        """Draw the next token.

        Args:
            logits_V: float32, the model's.

        Raises:
            InputError: the grammar's next step exceeds `GRAMMAR_LIMITS`.
        """
        token_id = self._next.draw(self._adjusted(logits_V))
        self.first_token = self.first_token or time.perf_counter()
        self._counts[token_id] += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        logprob = None
        if self._sampling.logprobs is not None:
            logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
            values, ids = logprobs_V.topk(min(self._sampling.logprobs, len(logprobs_V)))
            likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            logprob = TokenLogprob(token_id, float(logprobs_V[token_id]), likeliest)
            self.logprobs.append(logprob)
        text, thoughts = self._read(self._text.add(token_id))
        return Piece(token_id, text, logprob, thoughts)

    def finish(self) -> tuple[str, str]:
        """The text and the thoughts that were held back."""
        return self._read(self._text.finish(), is_last=True)

    def _read(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        thoughts, reader = "", self._reader
        if reader is not None:
            thoughts, text = reader.finish(text) if is_last else reader.add(text)
        self.said, self.thoughts = self.said + text, self.thoughts + thoughts
        return text, thoughts

    def _adjusted(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits after penalties, biases and grammar; without any, the same tensor."""
        sampling = self._sampling
        penalised = bool(sampling.presence_penalty or sampling.frequency_penalty) and bool(self._counts)
        if not penalised and not len(self._bias_ids) and self._matcher is None:
            return logits_V
        adjusted_V = logits_V.clone()
        if len(self._bias_ids):
            adjusted_V[self._bias_ids] += self._bias
        if penalised:
            ids = torch.tensor(list(self._counts), device=logits_V.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=logits_V.device)
            adjusted_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self._matcher is not None:
            assert sampling.grammar is not None
            mask = np.frombuffer(sampling.grammar.mask(self._matcher), dtype=np.uint8)
            allowed = np.unpackbits(mask, count=min(len(logits_V), 8 * len(mask)), bitorder="little").astype(bool)
            allowed_V = torch.from_numpy(np.pad(allowed, (0, len(logits_V) - len(allowed))))
            adjusted_V[~allowed_V.to(logits_V.device)] = -torch.inf
        return adjusted_V


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token's text, perhaps a part of a character; with the space that some have where others come first."""
    text: str = tokenizer.decode([token_id, token_id])[len(tokenizer.decode([token_id])) :]
    if UNFINISHED not in text:
        return text.encode()
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of SentencePiece
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    return bytes(letters[each] for each in token) if letters.keys() >= set(token) else text.encode()


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte of each letter of byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


class TextStream:
    """Decodes tokens one by one, and ends before a stop string.

    The stream holds back a character whose bytes have not all come, and text that may be the start of a stop string.

    Args:
        tokenizer: the model's.
        stop: strings that end the text; they are not part of it.
        hidden: tokens without text; None for the tokenizer's special ones.
        min_tokens: stop strings do not count in the text of so many first tokens.
        context: the tokens before the text, as far as it reads otherwise without them.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        hidden: frozenset[int] | None = None,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stop = tokenizer, re.compile("|".join(map(re.escape, stop))) if stop else None
        self._begun_stops = frozenset(one[:size] for one in stop for size in range(1, len(one)))
        self._longest_stop = max(map(len, stop), default=0)
        self._without_text = frozenset(tokenizer.all_special_ids) if hidden is None else hidden
        self._skips_special = hidden is None
        self._token_ids = [*context]
        self._read_from = len(context)  # tokens before it are decoded for good, into `text`
        self._context_from = 0  # decoded along with the tokens after it, since how a token reads depends on the one before
        self._returned = 0
        self._min_tokens, self._stops_from = len(context) + min_tokens, 0
        self.text = ""
        self.stop_string: str | None = None

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that has become certain."""
        if token_id in self._without_text:
            return ""
        self._token_ids.append(token_id)
        upto, known = len(self._token_ids), self._decode(self._read_from)
        decoded = self._decode(upto)
        if len(decoded) > len(known) and not decoded.endswith(UNFINISHED):
            self._append(decoded[len(known) :], upto)
        elif upto - self._read_from > MAX_UNDECODED:
            settled = self._settled(decoded)
            self._append(self._decode(settled)[len(known) :], settled)
        return self._return(0 if self.stop_string is not None else self._possible_stop())

    def finish(self) -> str:
        """Return the text that was held back, but for a character whose bytes have not all come."""
        if self.stop_string is None:
            known = self._decode(self._read_from)
            last = self._decode(len(self._token_ids))[len(known) :]
            self._append(last.removesuffix(UNFINISHED) if self._is_torn(last) else last, len(self._token_ids))
        return self._return(0)

    def _is_torn(self, last: str) -> bool:
        """Whether the text ends within a character, not with one that is no character."""
        if not last.endswith(UNFINISHED):
            return False
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        reader.decode(b"".join(token_bytes(self._tokenizer, token) for token in self._token_ids[self._read_from :]))
        return bool(reader.getstate()[0])

    def _settled(self, decoded: str) -> int:
        """A place between tokens whose text no later token changes; so the tokens without a character stay few."""
        last = len(self._token_ids) - SETTLED_TOKENS
        places = range(last, last - SETTLED_TOKENS, -1)
        return next((place for place in places if decoded.startswith(self._decode(place))), last)

    def _append(self, text: str, read_from: int) -> None:
        """Add certain text, that of the tokens before `read_from`, and cut it before the first stop string."""
        searched_from = max(self._stops_from, len(self.text) - self._longest_stop)
        self.text += text
        self._context_from, self._read_from = self._read_from, read_from
        if read_from <= self._min_tokens:
            self._stops_from = len(self.text)
        elif self._stop is not None and (found := self._stop.search(self.text, searched_from)):
            self.text, self.stop_string = self.text[: found.start()], found[0]

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with; many cost no more than one."""
        sizes = range(min(self._longest_stop - 1, len(self.text)), 0, -1)
        return next((size for size in sizes if self.text[-size:] in self._begun_stops), 0)

    def _return(self, held_back: int) -> str:
        upto = max(self._returned, len(self.text) - held_back)
        piece, self._returned = self.text[self._returned : upto], upto
        return piece

    def _decode(self, upto: int) -> str:
        """The text of the context and the tokens after it."""
        return str(self._tokenizer.decode(self._token_ids[self._context_from : upto], skip_special_tokens=self._skips_special))
