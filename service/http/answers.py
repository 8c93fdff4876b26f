"""Answers in OpenAI's shape, in one or in pieces: texts, calls of tools found in them, log-probabilities, and a report."""

import codecs
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

from cacheblend.service.engine.decoding import Piece, TextStream, TokenLogprob
from cacheblend.service.engine.reasoning import begun_size
from cacheblend.service.engine.request import PLAN_FIELDS, REASONS, Done, Request, chunk_origin

from .schemas import ChatBody, CompletionBody, GenerationBody, Schema
from .tool_json import read_arguments

CUT_CALL = re.compile(r'^\s*+\{\s*+"name"\s*+:\s*+"([\w-]++)"\s*+,\s*+"arguments"\s*+:\s*(.*)', re.DOTALL)
BARE = re.compile(r"\s*(?:`{1,3}[json]{0,4}\s*)?(?:\[\s*)?(\{.*)?", re.DOTALL)  # what may be calls, and nothing else
BETWEEN = " \t\r\n,;[]"
FENCE = re.compile(r"\A\s*```(?:json)?|```\s*\Z")
MARKS = "<tool_call>", "<tools>", "<function="  # of Hermes and Qwen, Qwen2.5-Coder, Qwen3-Coder
OPENS = re.compile("(?:<tool_call>|<tools>|(?=<function=))")
CLOSES = re.compile(rf"\A(?:\s*+</(?:tool_call|tools)>)?(?:\s*+(?={OPENS.pattern}|\Z))?")
PARAMETER = re.compile(r"<parameter=([^>]++)>\n?(?>(.*?)\n?</parameter>\s*+(?=<parameter=|</function>|\Z))", re.DOTALL)
WRITTEN = re.compile(rf"<function=([^>]++)>\s*+((?:{PARAMETER.pattern})*+)</function>", re.DOTALL)
Call = Mapping[str, Any]  # in OpenAI's shape


class TextChoice:
    """One choice of a text completion; `token_bytes` has the bytes of a token's text, `decode` the text of token ids."""

    prefix = "cmpl"
    kind = piece_kind = "text_completion"

    def __init__(
        self, index: int, body: ChatBody | CompletionBody, token_bytes: Callable[[int], bytes], decode: Callable[..., str]
    ) -> None:
        self._index, self._streamed, self._token_bytes = index, body.stream, token_bytes
        prompt = body.prompt[index // (body.n or 1)] if isinstance(body, CompletionBody) and body.echo else ""
        self._echoed = prompt if isinstance(prompt, str) else decode(prompt)
        self._has_logprobs = body.returned_logprobs is not None
        functions = [tool.function for tool in body.called_tools] if isinstance(body, ChatBody) else []
        tools = {function.name: function.parameters or {} for function in functions}
        is_forced = isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto")
        self._reader = CallReader(tools, 1 if body.parallel_tool_calls is False else None, is_forced=is_forced)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character is at the offset of its first token
        self._pending: list[TokenLogprob] = []  # of tokens whose text is held back
        self._offset: int | None = None  # characters of the tokens before; None before the first piece

    def add(self, event: Piece | Done) -> dict[str, Any] | None:
        """The choice in JSON: of a streamed piece, None where nothing is certain yet, or of a complete answer."""
        calls, reason, stop_string = list[Call](), None, None
        if isinstance(event, Piece):
            thoughts, text = event.thoughts, self._reader.add(event.text) if event.text else ""
            self._pending += [event.logprob] if event.logprob is not None else []
            if not (text or thoughts) and self._offset is not None:
                return None
        else:
            thoughts = event.last_thoughts if self._streamed else event.answer.thoughts
            text, calls = self._reader.finish(event.last_text if self._streamed else event.answer.text, event.finish_reason)
            reason = "tool_calls" if calls and not self._reader.is_cut else event.finish_reason
            stop_string = event.stop_string
            self._pending = self._pending if self._streamed else [*event.logprobs]
        text = text if self._offset is not None else self._echoed + text
        logprobs = self.logprobs(self._pending) if self._has_logprobs else None
        choice = {"index": self._index, **self.content(text, calls, thoughts), "logprobs": logprobs, "finish_reason": reason}
        choice["stop_reason"] = stop_string  # as vLLM has it
        self._pending, self._offset = [], self._offset or 0
        return choice

    def content(self, text: str, calls: Sequence[Call], thoughts: str) -> dict[str, Any]:  # only chats have the last two
        """Text, calls and thoughts, of a piece or of an answer."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of the tokens after those before."""
        sizes = [len(self._decoder.decode(self._token_bytes(each.token_id))) for each in tokens]
        *offsets, self._offset = accumulate(sizes, initial=self._offset or 0)
        likeliest = [((each.token_id, each.logprob), *each.likeliest) for each in tokens]
        return {
            "tokens": [self._shown(each.token_id) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{self._shown(token): logprob for token, logprob in likely} for likely in likeliest],
            "text_offset": offsets,
        }

    def _shown(self, token_id: int) -> str:
        """A token's text, or as OpenAI writes it the bytes of one that is a part of a character."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatChoice(TextChoice):
    """One choice of a chat completion."""

    prefix = "chatcmpl"
    kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def content(self, text: str, calls: Sequence[Call], thoughts: str) -> dict[str, Any]:
        """Text, calls and thoughts, of a piece or of an answer."""
        made: dict[str, Any] = {"role": "assistant", "refusal": None} if self._offset is None else {}
        if thoughts:
            made["reasoning_content"] = thoughts
        if text or not (thoughts and self._streamed):
            made["content"] = text if self._streamed or not calls else text or None
        if calls:
            made["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)] if self._streamed else calls
        return {"delta" if self._streamed else "message": made}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of tokens."""

        def reported(token_id: int, logprob: float) -> dict[str, Any]:
            return {"token": self._shown(token_id), "logprob": logprob, "bytes": list(self._token_bytes(token_id))}

        content = [
            {**reported(each.token_id, each.logprob), "top_logprobs": [reported(*likely) for likely in each.likeliest]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


class CallReader:
    """Finds the calls in one answer's text as it comes.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` with the name of a tool, or of Qwen3-Coder's form
    `<function=...><parameter=...>`, or an answer is only such objects, one after the other as Llama writes them, in a list as
    Mistral, Granite and Cohere do, or fenced as JSON. Text is held back from where a call may begin; what is no complete call
    stays text, unless the answer `is_cut` there after other calls. Calls after `max_calls` are dropped. An answer that
    `is_forced` to be a call has what came of it where it `is_cut`.

    Args:
        tools: the schema of each tool's arguments, by its name.
    """

    def __init__(self, tools: Mapping[str, Schema], max_calls: int | None = None, *, is_forced: bool = False) -> None:
        self._tools, self._max_calls = tools, max_calls
        self._is_forced, self.is_cut = is_forced, False
        self._held: list[str] = []
        self._holds_all = self._has_given = False

    def add(self, text: str) -> str:
        """The text that is certain not to be a call, with this piece of the answer."""
        if not self._tools:
            return text
        self._held.append(text)
        if self._holds_all:
            return ""
        held = "".join(self._held)
        if not self._has_given and (bare := BARE.fullmatch(held)):
            self._holds_all = bare[1] is not None
            return ""
        found = OPENS.search(held)
        self._holds_all = found is not None
        upto = found.start() if found else len(held) - begun_size(held, MARKS)
        self._held, self._has_given = [held[upto:]], self._has_given or upto > 0
        return held[:upto]

    def finish(self, text: str = "", reason: str = "stop") -> tuple[str, list[Call]]:
        """The text that was held back, with the last piece of an answer that ends by `reason`, and calls in OpenAI's shape."""
        held = "".join((*self._held, text))
        self._held = []
        if not self._tools:
            return held, []
        if not self._has_given and (bare := BARE.fullmatch(held)) and bare[1]:
            if bare_calls := self._bare_calls(held):
                return "", bare_calls[: self._max_calls]
            if self._is_forced:
                self.is_cut, begun = True, CUT_CALL.match(held)
                return "", [_as_call(begun[1], begun[2])] if begun else []
        before, calls, at = "", list[Call](), 0
        while found := OPENS.search(held, at):
            call, end = self._call(held, found.end())
            if call is None:
                break
            before, at = before + held[at : found.start()], len(held) - len(CLOSES.sub("", held[end:]))
            calls.append(call)
        if found and calls and reason == "length":  # of the call that begins there is nothing to be used
            self.is_cut, held = self._max_calls is None or len(calls) < self._max_calls, held[: found.start()]
        return before + held[at:], calls[: self._max_calls]

    def _bare_calls(self, text: str) -> list[Call]:
        """The calls that all of a text is made of; none where there is anything else."""
        calls, rest = list[Call](), FENCE.sub("", text).lstrip(BETWEEN)
        while rest:
            call, end = self._call(rest, 0)
            if call is None:
                return []
            calls.append(call)
            rest = rest[end:].lstrip(BETWEEN)
        return calls

    def _call(self, text: str, start: int) -> tuple[Call | None, int]:
        """The call that begins at a place, after white space, and where it ends; None where there is none."""
        start = len(text) - len(text[start:].lstrip())
        try:
            if written := WRITTEN.match(text, start):
                name, end, schemas = written[1], written.end(), self._tools[written[1]].get("properties", {})
                given = {key: _read_value(value, schemas.get(key, {})) for key, value in PARAMETER.findall(written[2])}
            else:
                value, end = json.JSONDecoder().raw_decode(text, start)
                name = value.get("name", value.get("tool_name"))  # the latter is Cohere's word
                given = value.get("arguments") or value.get("parameters") or {}  # and Llama's
            if name not in self._tools:
                return None, start
            arguments = json.dumps(read_arguments(given), ensure_ascii=False)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return None, start
        return _as_call(name, arguments), end


def _read_value(text: str, schema: Schema) -> Any:
    """Read a parameter of Qwen3-Coder's: as JSON where the schema has types for it, none of them a text, and it is JSON."""
    kinds = [way.get("type", ()) for way in (schema, *schema.get("anyOf", ())) if isinstance(way, dict)]
    if any(kinds) and not any("string" in kind for kind in kinds):
        with suppress(ValueError):
            return json.loads(text, parse_constant=str)
    return text


def _as_call(name: str, arguments: str) -> Call:
    id_ = secrets.token_hex(5)[:9]  # Mistral's templates want 9
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_report(body: GenerationBody, served: Request, done: Done) -> dict[str, Any]:
    """`cacheblend` of a response: method, hits, ratio, times and, where they are asked for, the chunks."""
    plan, timings = done.answer.plan, done.answer.timings
    report = {
        **{name: getattr(plan, name) for name in PLAN_FIELDS},
        "num_chunks": len(done.answer.chunks),
        "loaded_bytes": dict(plan.loaded_bytes),
        "retrieve_s": timings.retrieve_s,
        "queue_s": done.queue_s,
        "ttft_s": timings.ttft_s,
        "total_s": timings.total_s,
        "prepare_s": served.retrieved - served.asked.arrived,
    }
    if served.asked.passages:
        report["passages"] = len(served.asked.passages)
    report |= {name: why for name in REASONS if (why := getattr(plan, name)) is not None}
    if body.return_chunks:
        report["chunks"] = chunk_report(done, served.engine.fusor.tokenizer)
    return report


def usage(choices: Mapping[int, Done], n: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage` of all choices, by index, `n` of each prompt; `recomputed_tokens` are the mean over layers 1 and up."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    plans = [choices[place].answer.plan for place in range(0, len(choices), n)]
    prompt_tokens = sum(plan.prompt_tokens for plan in plans)
    completion_tokens = sum(len(done.answer.token_ids) for done in choices.values())
    of_prompts = {name: sum(getattr(plan, name) for plan in plans) for name in ("cached_tokens", "recomputed_tokens")}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": of_prompts,
        **details,
    }


def chunk_report(done: Done, tokenizer: Any) -> list[dict[str, Any]]:
    """A prompt's chunks in order: origin, tier of the KV, and each token's text, deviation, share of recomputing layers."""
    plan, chunks = done.answer.plan, done.answer.chunks
    share_N = torch.zeros(plan.prompt_tokens)
    for positions in (later := plan.recomputed[1:]):
        share_N[positions] += 1 / len(later)
    ends = list(accumulate(len(segment.token_ids) for segment in plan.segments))
    stop = plan.prompt_tokens - sum(len(scored.chunk.token_ids) for scored in chunks) - plan.suffix_tokens
    report = []
    for scored in chunks:
        start, stop = stop, stop + len(scored.chunk.token_ids)
        texts = token_texts(scored.chunk.token_ids, tokenizer)
        rows = zip(texts, done.deviation_N[start:stop].tolist(), share_N[start:stop].tolist(), strict=True)
        tokens = [{"text": text, "deviation": round(moved, 6), "recomputed": round(share, 4)} for text, moved, share in rows]
        source = plan.segments[bisect_right(ends, start)].tier or "computed"
        report.append({**chunk_origin(scored), "source": source, "tokens": tokens})
    return report


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Each token's part of their text, the spaces between them included; a character of several tokens is the last one's."""
    stream = TextStream(tokenizer)
    texts = [stream.add(token) for token in token_ids]
    return [*texts[:-1], texts[-1] + stream.finish()]
