"""A chat over an engine, shared by the adapters of frameworks: options of a call, passages in messages, streamed answers."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import Chunk, ScoredChunk
from cacheblend.service import Engine
from cacheblend.service.engine.grammar import GrammarCompiler, answer_schema
from cacheblend.service.engine.prompt import Message
from cacheblend.service.engine.reasoning import Thoughts
from cacheblend.service.engine.request import Done, Request

PROMPT_OPTIONS = (
    *("method", "recompute_ratio", "max_tokens", "temperature", "top_p", "top_k"),
    *("seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"),
)
OPTIONS = ("documents", "stop", *PROMPT_OPTIONS, "response_format", "chat_template_kwargs")  # of a call
Pieces = Generator[tuple[str, Done | None], None, None]


class EngineChat:
    """Answers chats over an open engine's stored KV. Thread-safe; it holds no thread and nothing to close."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._grammars = GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer)

    def stream(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        """Yield the answer's text as its tokens come, with None, and at last the remaining text with the finished request.

        A reasoning model's thoughts are no part of the text; the finished request's answer has them.

        The caller's thread runs the model, a token a step; closing the generator before its end frees everything. Options
        are those of `OPTIONS`, the engine's where they are None or missing: `stop` ends the answer, a string or several;
        `documents` are put before the last message, and without them passages are looked for in the messages;
        `chat_template_kwargs` are variables of the model's chat template, such as `enable_thinking`.

        Raises:
            ConfigError: variables that the template does not know.
            InputError: an option that is not known, or see `Engine.prepare`.
        """
        # 1. Lay out the prompt, and say how tokens are drawn.
        if unknown := ", ".join(sorted(options.keys() - set(OPTIONS))):
            raise InputError(f"{unknown}: not an option of this model; give {', '.join(OPTIONS)}")
        chosen = {name: value for name, value in options.items() if value is not None}
        request = self._prepare(messages, chosen)
        # 2. Prefill, a layer a step, and decode, a token a step.
        with closing(self.engine.stream(request)) as events:
            for event in events:
                if isinstance(event, Done):
                    yield event.last_text, event
                elif event.text:
                    yield event.text, None

    def known_chunk(self, text: str, metadata: Mapping[str, Any]) -> Chunk | None:
        """The engine's own chunk that a framework's document is; None where it is another retriever's, or was deleted."""
        id_, position = metadata.get("document_id"), metadata.get("position")
        with suppress(InputError):
            chunks = self.engine.retriever.chunks(id_) if isinstance(id_, str) else []
            return next((chunk for chunk in chunks if (chunk.position, chunk.text) == (position, text)), None)
        return None

    def _prepare(self, messages: Sequence[Message], chosen: Mapping[str, Any]) -> Request:
        engine, given = self.engine, chosen.get("documents") or ()  # blank ones, as of scanned pages, are left out
        documents = [one for one in given if not isinstance(one, Mapping) or str(one.get("text")).strip()] or None
        variables = chosen.get("chat_template_kwargs", {})
        if not isinstance(variables, Mapping):
            raise ConfigError("chat_template_kwargs", variables, 'a mapping such as {"enable_thinking": False}')
        texts = [] if documents is not None else [(message.role, message.content) for message in messages]
        layout = engine.prompts.chat(messages, with_chunks=documents is not None, template_kwargs=variables)
        thoughts = engine.prompts.thoughts(layout)
        return engine.prepare(
            messages[-1].content,
            layout=layout,
            passages=engine.find_passages(texts),
            thoughts=thoughts,
            num_chunks=0,
            documents=documents,
            stop=[stop] if isinstance(stop := chosen.get("stop", ()), str) else [*stop],
            grammar=self._grammar(chosen.get("response_format"), thoughts),
            **{name: chosen[name] for name in PROMPT_OPTIONS if name in chosen},
        )

    def _grammar(self, response_format: Any, thoughts: Thoughts | None) -> Any:
        """The grammar of OpenAI's `response_format` after thoughts; None for plain text."""
        match response_format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return self._grammars.json({"type": "object"}, thoughts=thoughts)
            case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema, **others}}:
                return self._grammars.json(answer_schema(schema, is_strict=bool(others.get("strict"))), thoughts=thoughts)
        raise InputError('response_format: type must be "json_object", or "json_schema" with json_schema={"schema": {...}}')


def report(done: Done) -> dict[str, Any]:
    """Metadata of an answer: why it ended, tokens, plan and timings."""
    plan, answer = done.answer.plan, done.answer.as_dict()
    thoughts = {"reasoning_content": done.answer.thoughts} if done.answer.thoughts else {}
    return {
        **thoughts,
        "finish_reason": done.finish_reason,
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": len(answer["token_ids"]),
        "total_tokens": plan.prompt_tokens + len(answer["token_ids"]),
        "cached_tokens": plan.cached_tokens,
        "plan": answer["plan"],
        "timings": answer["timings"],
    }


def chunk_metadata(found: ScoredChunk) -> dict[str, Any]:
    """Metadata of a found chunk as a framework's document; `EngineChat.known_chunk` finds the chunk by it."""
    chunk = found.chunk
    origin = {"document_id": chunk.document_id, "title": chunk.title, "position": chunk.position}
    return {**found.metadata, **origin, **found.place.as_dict()}


def message_of(role: str | None, kind: str, texts: Sequence[object]) -> Message:
    """A framework's message of a kind: its role, None for one that is no chat's, and its parts, None for one that is no text.

    Raises:
        InputError: the role or a part is None.
    """
    if role is None:
        raise InputError(f"a {kind} message cannot be answered; give system, user and assistant messages")
    if not all(isinstance(text, str) for text in texts):
        raise InputError("a message's content must be text; leave images and files out")
    return Message(role, "".join(map(str, texts)))
