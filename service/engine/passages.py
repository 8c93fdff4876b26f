"""Passages in a prompt's own texts, whose stored KV is reused where they stand; the prompt's tokens stay what they are."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cacheblend.store import PASSAGES, ChunkKey
from cacheblend.store.tiers import AdmissionFilter

from .prompt import PromptChunk, PromptTokens

if TYPE_CHECKING:
    from cacheblend.retriever import Chunk
    from cacheblend.retriever.passages import Passage

    from .chunk_context import ChunkNaming
    from .engine import Engine

LEAST_TOKENS = 16  # of a passage that is reused
LEAST_SHARE = 0.25  # of the tokens that no exact prefix covers: where less can be reused, nothing is
EDGE_TOKENS = 8  # at either end of a passage that other text around it may have made others
REMEMBERED = 8192  # passages that came once; two requests further apart than so many others count as two first ones
MAX_LOST = 8  # passages whose tokens are not in the prompt, after which no more are looked for


class FoundPassage(NamedTuple):
    """A `Passage` with the number of its message, and its text."""

    message: int
    text: str
    start: int
    end: int
    reason: str
    chunk: Chunk | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: the chunk by its document."""
        plain = self._asdict()
        chunk = plain.pop("chunk")
        return {**plain, "document_id": chunk and chunk.document_id}


def passages_of(messages: Iterable[tuple[str, str]], find: Callable[[str, str], Iterable[Passage]]) -> tuple[FoundPassage, ...]:
    """The passages in messages, a role and a text each, in the prompt's order; `find` has a text and its role."""
    found = ((number, text, one) for number, (role, text) in enumerate(messages) for one in find(text, role))
    return tuple(FoundPassage(number, text[one.start : one.end], *one) for number, text, one in found)


def locate(prompt_ids: Sequence[int], passages: Iterable[tuple[Sequence[int], int]]) -> list[tuple[int, int, int] | None]:
    """Where passages stand in a prompt; most templates keep the messages' order, some put the system message last.

    Tokens at a passage's ends may be others there than where it is tokenised by itself; such tokens are left out.

    Args:
        prompt_ids: N token ids.
        passages: token ids of each, by itself, and how many of the first of them are not looked for.

    Returns:
        For each (start, stop, first): its tokens from `first` on stand at the prompt's positions from `start` to before `stop`;
        None where it is not in the prompt.
    """
    prompt, done, lost = "".join(map(chr, prompt_ids)), 0, 0  # text, as Python searches it in linear time
    taken = list[tuple[int, int]]()  # in the prompt's order
    found: list[tuple[int, int, int] | None] = []
    for ids, skipped in passages:
        passage = "".join(map(chr, ids))
        edge = min(EDGE_TOKENS, (len(ids) - skipped) // 4)
        first, last = skipped + edge, len(ids) - edge
        start, is_long = -1, last - first >= LEAST_TOKENS // 2
        if is_long and lost < MAX_LOST:
            start = prompt.find(passage[first:last], done)
            start = prompt.find(passage[first:last]) if start < 0 else start
        stop, at = start + last - first, bisect(taken, (start, start))
        least, most = taken[at - 1][1] if at else 0, taken[at][0] if at < len(taken) else len(prompt) - 1
        if start < least or stop > most:
            lost += is_long
            found.append(None)
            continue
        while start > least and first > skipped and prompt[start - 1] == passage[first - 1]:
            start, first = start - 1, first - 1
        while stop < most and last < len(ids) and prompt[stop] == passage[last]:
            stop, last = stop + 1, last + 1
        done, lost = stop, 0
        taken.insert(at, (start, stop))
        found.append((start, stop, first) if stop - start >= LEAST_TOKENS else None)
    return found


class PassageReuse:
    """Finds the stored KV of passages in prompts, and has the KV of those that came before computed. Thread-safe.

    The KV of a passage of no ingested document is stored when another request has it a second time, in a namespace of its own.

    Args:
        engine: with the store, the index and the prefix cache.
        naming: names passages' KV.
    """

    def __init__(self, engine: Engine, naming: ChunkNaming) -> None:
        self._engine, self._naming = engine, naming
        self._seen = AdmissionFilter(REMEMBERED)

    def cut(self, prompt: PromptTokens, found: Sequence[FoundPassage], namespace: str) -> PromptTokens:
        """The prompt, cut at passages whose KV is stored; uncut where too little is reused."""
        engine, token_ids = self._engine, prompt.token_ids
        # 1. Each passage by itself, and where it stands.
        with engine.prefixes.find(token_ids, len(token_ids) - 1, namespace) as prefix:
            exact = prefix.tokens
        placed, stored = self._look_up(token_ids, found, namespace)
        located = [(chunk, place, one) for (chunk, place), one in zip(placed, found, strict=True) if place]
        # 2. Those that are not stored are noted, once a request; paragraphs that all prompts begin with stay exact.
        missing = {chunk.key: chunk for chunk, (start, *_), one in located if start >= exact or one.reason != "paragraph"}
        for key in missing.keys() - stored - {None}:
            if missing[key].document or self._seen.admits(str(key)):
                engine.background.submit(missing[key])
        # 3. The prompt's rows: passages that are stored and not in the prefix, and what stands between them.
        hits = [(chunk, place) for chunk, place, _ in located if chunk.key in stored and place[0] >= exact]
        hits.sort(key=lambda hit: hit[1][0])
        reused = sum(stop - start for _, (start, stop, _) in hits)
        if not hits or reused < LEAST_SHARE * (len(token_ids) - exact):
            return prompt
        rows, begin = list[PromptChunk](), hits[0][1][0]
        done = begin
        for chunk, (start, stop, first) in hits:
            rows += [PromptChunk(token_ids[done:start])] if start > done else []
            rows.append(replace(chunk, token_ids=token_ids[start:stop], stored_ids=chunk.token_ids, start=first))
            done = stop
        return PromptTokens(token_ids[:begin], token_ids[done:], tuple(rows))

    def explain(self, prompt: PromptTokens, found: Sequence[FoundPassage], namespace: str) -> dict[str, Any]:
        """See `Engine.explain`: each passage with its tokens in the prompt, and whether their KV is stored."""
        placed, stored = self._look_up(prompt.token_ids, found, namespace)
        shown = [
            {**one.as_dict(), "tokens": place[1] - place[0] if place else 0, "stored": bool(place) and chunk.key in stored}
            for one, (chunk, place) in zip(found, placed, strict=True)
        ]
        reused = sum(one["tokens"] for one in shown if one["stored"])
        blends = self._engine.fusor.exact_reason is None and reused >= LEAST_SHARE * len(prompt)
        return {"passages": shown, "prompt_tokens": len(prompt), "reused_tokens": reused if blends else 0}

    def _look_up(
        self, token_ids: Sequence[int], found: Sequence[FoundPassage], namespace: str
    ) -> tuple[list[tuple[PromptChunk, tuple[int, int, int] | None]], set[ChunkKey]]:
        """Each passage and where it stands in the prompt, see `locate`, and the keys of those in it whose KV is stored."""
        chunks = list(self._chunks(found, namespace))
        places = locate(token_ids, ((chunk.token_ids, skipped) for chunk, skipped in chunks))
        placed = [(chunk, place) for (chunk, _), place in zip(chunks, places, strict=True)]
        keys = [chunk.key for chunk, place in placed if place and chunk.key is not None]
        return placed, {key for key, is_there in zip(keys, self._engine.store.find(keys), strict=True) if is_there}

    def _chunks(self, found: Sequence[FoundPassage], namespace: str) -> Iterator[tuple[PromptChunk, int]]:
        """Each passage with the key of its KV, and how many tokens of that, those of a title, are not in the prompt."""
        rows = iter(self._engine.prompt_chunks([one.chunk for one in found if one.chunk is not None], namespace))
        for one in found:
            if one.chunk is None:
                token_ids = tuple(self._engine.prompts.text_ids(one.text))
                yield PromptChunk(token_ids, self._naming.key(token_ids, (), PASSAGES + namespace)), 0
            else:
                yield next(rows), len(self._engine.prompts.text_ids(one.chunk.text.partition(one.text)[0].lstrip()))
