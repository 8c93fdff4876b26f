"""The splitter: documents cut into chunks of the model's own tokens, without control tokens."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from os.path import commonprefix
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from cacheblend.base.errors import InputError, RetrieverError
from cacheblend.base.threads import Check

from .config import SEPARATOR, RetrieverConfig
from .document import Chunk, Document, TableHead, title_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHITE_SPACE = " \t\n\r\u2581"  # the last stands for a space in SentencePiece vocabularies
CUT_CHARACTERS = 2**17
SHORT_CHARACTERS = 8  # a token: a text with more of them is hardly one chunk, and is not tokenised whole to find out
# Where a text may be cut, the best first: before a Markdown heading, after empty lines, before a table's row, after a sentence,
# a line; else between words.
# Possessive, and only from the first mark of a run: a run that no blank follows is read once, not once for each of its marks.
_SENTENCE_END = r"(?<![.!?\u2026\u061f\u06d4])[.!?\u2026\u061f\u06d4]++[\"'\u2019\u201d)\]]*+(?=\s)|[\u3002\uff01\uff1f\u0964]"
BREAKS = [re.compile(each) for each in (r"\n(?=#{1,6} )", r"\n\s*\n", r"\n(?=\|)", _SENTENCE_END, r"\n", r"\w(?=\s)")]


class PlainTokenizer:
    """A private copy of a Hugging Face tokenizer that adds no control tokens, reads none in the text, and never truncates.

    It is a copy, because the tokenizer's owner may change its truncation or special-token settings from another thread. Control
    tokens are not read, because a document that contains `</s>` must not end a prompt, and `<think>` or `<tool_call>` in a text
    must not begin a thought or a call. All added tokens are control tokens, special or not, except white space and the unknown
    token. Texts are tokenised as batches of one: for a single text the tokenizer holds Python's lock, a second for each
    megabyte.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or the `tokenizers.Tokenizer` inside one.
        slice_characters: of a long text that are tokenised at once.

    Attributes:
        control_texts: the texts of control tokens.

    Raises:
        RetrieverError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer, *, slice_characters: int = CUT_CHARACTERS) -> None:
        self._slice_characters = slice_characters
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            raise RetrieverError(f"{type(tokenizer).__name__} is no fast tokenizer; use a model that has a tokenizer.json")
        definition = json.loads(backend.to_str())
        model = definition["model"]
        unknown = {model.get("unk_token"), model.get("unk_id")}  # by content, or by id in Unigram models
        controls = [token for token in definition["added_tokens"] if token["special"] or token["content"].strip(_WHITE_SPACE)]
        for token in controls:
            token["special"] = True  # and special tokens are not read, below; taken out, they would move the others' ids
        self._controls = frozenset(
            token["id"]
            for token in controls
            if len(token["content"]) > 1 and unknown.isdisjoint((token["content"], token["id"]))
        )
        self.control_texts = re.compile(_any_of({token["content"] for token in controls}) or r"(?!)")
        self._tokenizer = Tokenizer.from_str(json.dumps(definition))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self._tokenizer.encode_special_tokens = True

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return ids if self._controls.isdisjoint(ids) else [token for token, _ in self._encode(text)]

    def controls(self, token_ids: Iterable[int]) -> list[int]:
        """The control tokens among ids, in order."""
        return [token for token in token_ids if token in self._controls]

    def cut(self, text: str, max_tokens: int, *, at_sentences: bool = False, check: Check = lambda: None) -> list[str]:
        """Cut `text` every `max_tokens` tokens; no piece is empty.

        With `at_sentences` a piece ends at the last of the best `BREAKS` in its second half; and the last piece is no shorter
        than a quarter, unless it is the only one.

        Pieces are slices of `text`, not decoded tokens: decoding would turn a character with bytes on both sides of a
        border into U+FFFD, and drop leading spaces with some tokenizers. Such a character belongs to the later piece.
        The pieces joined are exactly `text`; a text without tokens has no piece. A long text is tokenised in
        slices of `slice_characters`, each from the start of the previous slice's last piece: at once it would need 300 bytes a
        byte. `check` is called before each slice; an error that it raises ends the work.
        """
        spans: list[tuple[int, int]] = []
        start, size = 0, self._slice_characters
        while True:
            check()
            found = self._spans(text[start : start + size], max_tokens, at_sentences)
            if start + size >= len(text):
                spans.extend((start + first, start + end) for first, end in found)
                return [text[first:end] for first, end in spans]
            if not found or found[-1][0] == 0:  # not one piece that the slice's end has not cut
                size *= 2
                continue
            spans.extend((start + first, start + end) for first, end in found[:-1])
            start, size = start + found[-1][0], self._slice_characters

    def _spans(self, text: str, max_tokens: int, at_sentences: bool) -> list[tuple[int, int]]:
        """Start and end of each piece."""
        starts = [start for _, start in self._encode(text)]
        if not starts:
            return []
        # Borders never run backwards, whatever a normaliser does to offsets, so that no text is lost or doubled.
        borders = list(accumulate([0, *starts[1:], len(text)], max))
        cut = _sentence_spans if at_sentences else _token_spans
        return [(first, end) for first, end in cut(text, borders, max_tokens) if first < end]

    def _encode(self, text: str, start: int = 0) -> list[tuple[int, int]]:
        """Token ids and the position in the text where each starts.

        Some vocabularies contain a control token as an ordinary word, and find it in plain text. There the text is cut after
        the word's first character, and both parts are encoded separately; a control token that is a single character is
        dropped.
        """
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        pairs = list(zip(encoding.ids, (start + first for first, _ in encoding.offsets), strict=True))
        if self._controls.isdisjoint(encoding.ids):
            return pairs
        tokens: list[tuple[int, int]] = []
        done = 0
        for token, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._controls and end - first > 1 and first >= done:
                cut = first + 1
                tokens += [*self._encode(text[done:cut], start + done), *self._encode(text[cut:end], start + cut)]
                done = end
        if not done:
            return [pair for pair in pairs if pair[0] not in self._controls]
        return [*tokens, *self._encode(text[done:], start + done)]


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of distinct texts, the longer of two that begin alike first, by which a letter is read once for all of them."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    parts = []
    for _, group in sorted(groups.items(), reverse=True):
        common = commonprefix(group)  # noqa: RUF071  # by characters, as is wanted
        parts.append(re.escape(common) + (f"(?:{_any_of(text[len(common) :] for text in group)})" if group[1:] else ""))
    return "|".join(parts)


def _token_spans(_: str, borders: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Start and end of each piece of just so many tokens; token t reaches from `borders[t]` to `borders[t + 1]`."""
    for first in range(0, len(borders) - 1, max_tokens):
        yield borders[first], borders[min(first + max_tokens, len(borders) - 1)]


def _sentence_spans(text: str, borders: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Start and end of each piece, cut at `BREAKS`; see `_token_spans`."""
    tokens = len(borders) - 1
    if tokens <= max_tokens:
        yield 0, len(text)
        return
    breaks = [sorted({bisect_left(borders, match.end()) for match in each.finditer(text)}) for each in BREAKS]
    first = last = start = 0
    while last < tokens:
        last = tokens
        if last - first > max_tokens:
            latest = max(min(first + max_tokens, tokens - max_tokens // 4), first + 1)
            earliest = first + max(max_tokens // 2, 1)
            before = (places[bisect_left(places, latest + 1) - 1] for places in breaks if places and places[0] <= latest)
            last = next((place for place in before if place >= earliest), latest)
        end = borders[last] + (text[borders[last] : borders[last] + 1] == " ")  # the next piece begins with a word
        yield start, end
        first, start = last, end


class Splitter:
    """Cuts documents into chunks of the model's own tokens, at sentences.

    Args:
        tokenizer: the model's fast tokenizer; it is copied.
        config: `chunk_tokens` is used.

    Raises:
        RetrieverError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer, config: RetrieverConfig) -> None:
        self.config = config
        self._tokenizer = PlainTokenizer(tokenizer)
        self.fingerprint = self._tokenizer.fingerprint  # chunks of another tokenizer do not fit
        self._separator_tokens = len(self._tokenizer.ids(SEPARATOR))

    def beginning(self, text: str, max_tokens: int) -> str:
        """The first tokens of a text, as text."""
        return next(iter(self._tokenizer.cut(text, max_tokens)), "")

    def token_ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a chunk's text and its separator."""
        return tuple(self._tokenizer.ids(text + SEPARATOR))

    def split(self, document: Document, check: Check = lambda: None) -> list[Chunk]:
        """Cut a document into chunks.

        `check` is called between the slices of a long text, and between chunks; an error that it raises ends the work.

        The chunks' texts joined are exactly the document's content (title line and text), but for the heads of
        tables: a chunk that begins within a table repeats the head, if that is no longer than a quarter. A chunk has at most
        `chunk_tokens` tokens, those of the separator, and a few more: it is tokenised anew by itself (which may cut a word in
        two or regroup a number), and begins with a complete character.

        Raises:
            InputError: the tokenizer makes no tokens of the document.
        """
        content, max_tokens = document.content, self.config.chunk_tokens
        if len(content) <= SHORT_CHARACTERS * max_tokens:
            ids = self.token_ids(content)
            if self._separator_tokens < len(ids) <= max_tokens:  # one chunk, tokenised once, as a request's passage usually is
                return [Chunk(document.id, document.version, 0, document.title, content, ids)]
        check()
        table = TableHead(document.id, title_line(document.title, content))
        sizes = {head: len(self._tokenizer.ids(head)) for head in table.all_of(content) if len(head) <= len(content) // 2}
        short = {head: size for head, size in sizes.items() if size <= max_tokens // 4}
        max_tokens -= max(short.values(), default=0)
        texts = self._tokenizer.cut(content, max_tokens, at_sentences=True, check=check)
        if not texts:
            raise InputError(f"document {document.id!r} has no tokens for this model's tokenizer; leave it out")
        chunks: list[Chunk] = []
        for position, text in enumerate(texts):
            check()
            text = table.head + text if table.head in short and text.strip() else text
            table.follow(text)
            chunks.append(Chunk(document.id, document.version, position, document.title, text, self.token_ids(text)))
        return chunks
