"""Passages in the texts of prompts: stored chunks word for word, what applications write around retrieved texts, and prose.

Only the text and the stored chunks say what a passage is. Every step looks at a character a bounded number of times.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from .document import Chunk

LEAST_CHARACTERS = 100  # of a passage: what is shorter saves less than it disturbs
MOST_CHARACTERS = 20_000  # of a passage that nothing but its form or its sentences show: its KV is computed in one pass
PARAGRAPH_CHARACTERS = 200  # of one that nothing but empty lines show,
PARAGRAPH_SENTENCES = 3
WINDOW = 96  # first characters of a stored text by which it is looked up
CANDIDATES = 32  # stored texts of the same first characters, the newest, that a place in a text is compared with
WORK = 16  # characters compared for each character of a text, at most

# What applications write before a retrieved text, a form a line: at the beginning of a line, and the text follows.
FORMS = {
    "numbered": r"\[\d{1,4}\][:.)]?[ \t]+(?=\S)",
    "labelled": r"(?:document|source|passage|chunk|snippet|excerpt|result|reference)[ \t]*+(?:#?[\d.]{1,6})?[ \t]*+"
    r"(?:[(\[][^()\[\]\n]{0,200}[)\]])?[ \t]*+:",
    "context": r"context:|└──[ ]content:|context[ ]information[ ]is[ ]below\.|"
    r"(?![ \t]*(?:if|elif|while|for)[ ](?:not[ ])?[\w.]+(?:[ ](?:is|in|not)[ ].*)?:)"  # code
    r"[^:\n(=]{0,80}\b(?:context|passages|documents|sources|excerpts|snippets|background)\b[^:\n)=]{0,40}:[ \t]*$",
}
# And what ends them: questions, instructions and examples follow, which stay exact.
ENDS = "question|query|answer|response|instructions?|tasks?|rules|guidelines|examples?|input|output|user|human|assistant|ai|q|a"
TAGS = "source document doc passage chunk snippet excerpt result reference document_content page_content text"
LISTS = "sources documents docs passages chunks results references context"  # whose texts stand apart by empty lines
_LINE = re.compile(
    "^[ \t#*>]{0,8}(?:"
    + rf"(?P<end>(?:{ENDS})(?:[ \t]\d{{1,3}})?[ \t*]{{0,4}}:|(?<=#[ ])(?:{ENDS})[ \t]*$)|"
    + r"(?P<rule>(?:-{3,}|={3,}|_{3,}|\*{3,}|\[end[ ][^]\n]{1,40}\])[ \t]*$)|(?P<fence>```|~~~)|"
    + "|".join(f"(?P<{name}>{form})" for name, form in FORMS.items())
    + ")",
    re.IGNORECASE,
)
_TAG = re.compile(rf"<(?P<close>/?)(?P<name>{'|'.join([*TAGS.split(), *LISTS.split()])})\b[^<>\n]{{0,300}}>", re.IGNORECASE)
_START = re.compile(r"(?<!\w)\S")  # where a stored text may begin
_SENTENCE_END = re.compile(r"[.!?\u2026\u061f\u06d4][\"'\u2019\u201d)\]]?(?=\s|$)|[\u3002\uff01\uff1f\u0964]")
_STRING_MARK = re.compile(r'\\.|"', re.DOTALL)
_INSTRUCTS = re.compile(  # words of instructions in English, and by which others are known, in small letters
    r"\b(?:you|your|please|always|never|don't|do not|must|should|respond|answer|output|du|immer|niemals?|bitte|antworte|vous|"
    r"toujours|jamais|veuillez|répondez|eres|siempre|nunca|por favor|debes|responde|sei|sempre|mai|per favore|devi|rispondi|"
    r"você|responda|deve|jij|altijd|nooit|moet|antwoord|вы|всегда|никогда|пожалуйста|отвечайте|أنت|دائما|أبدا|يجب|من فضلك|"
    r"आप|हमेशा|कभी|कृपया|उत्तर)\b|你|您|请|必须|不要|回答|ください|必ず|決して|答え|당신|항상|절대|하세요|마세요|답변"
)
_ANSWER = re.compile(r"\n[ \t#*]{0,8}[^\W\d]\w{0,20}(?:[ ]\w{1,20})?:[^\n]*\Z")  # of an example: a last line with a label
_CODE_LINE = re.compile(
    r"^[ \t]*+(?:(?:def|class|import|from|return|func|fn|function|const|let|var|public|private|static|package|use|using)[ \t]\S"
    r"|#(?:include|define)|select[ \t].*[ \t]from|[\w.]++[ \t]*+=[ \t]|.*[;{}][ \t]*$)",
    re.IGNORECASE,
)
CODE_LINES = 3  # in a text that has them, paragraphs and notes are comments
_CODE = "{}<>;=|\\`_$@^~#/\t"


class Passage(NamedTuple):
    """A part of a text that is taken for a passage: where it stands, why, and the stored chunk that it is."""

    start: int
    end: int
    reason: str  # "stored", a name of `FORMS`, "tag", "json" or "paragraph"
    chunk: Chunk | None = None


class StoredTexts:
    """The stored chunks' texts, looked up at every place of a text where a word begins. Not thread-safe.

    A text is known by its first characters, its length and a hash; `read` has it for the comparison that decides.

    Args:
        read: the chunk of an index id; None if it is gone.
    """

    def __init__(self, read: Callable[[int], Chunk | None]) -> None:
        self._read = read
        self._known: dict[int, list[tuple[int, int, int]]] = {}  # by hash of the window: index id, length, hash
        self._count, self.last = 0, 0  # of the chunks; the highest index id

    def add(self, texts: Iterable[tuple[int, str, str]]) -> None:
        """Note chunks by ascending index ids, their documents' titles, and texts."""
        for id_, title, text in texts:
            self._count, self.last = self._count + 1, id_
            for core in _cores(title, text):
                of_window = self._known.setdefault(hash(core[:WINDOW]), [])
                of_window.append((id_, len(core), hash(core)))
                del of_window[:-CANDIDATES]

    def retain(self, ids: Iterable[int]) -> None:
        """Forget the chunks that have none of these index ids."""
        left = {id_ for id_ in ids if id_ <= self.last}
        if len(left) < self._count:
            known = ((window, [one for one in texts if one[0] in left]) for window, texts in self._known.items())
            self._known = {window: texts for window, texts in known if texts}
        self._count = len(left)

    def find(self, text: str) -> list[Passage]:
        """Where stored texts stand in a text, in order, without overlap; of two that begin at one place the longer one."""
        found, done, work, known = list[Passage](), 0, WORK * len(text), self._known
        for match in _START.finditer(text) if known else ():
            start = match.start()
            candidates = known.get(hash(text[start : start + WINDOW]))
            if candidates is None or start < done:
                continue
            for id_, length, digest in sorted(candidates, key=lambda one: -one[1]):
                work, part = work - length, text[start : start + length]
                if work <= 0 or hash(part) != digest:
                    continue
                if (chunk := self._read(id_)) is not None and part in _cores(chunk.title, chunk.text):
                    found.append(Passage(start, done := start + length, "stored", chunk))
                    break
        return found


def _cores(title: str, text: str) -> list[str]:
    """The texts by which a chunk is found in prompts: without white space at its ends, and the first without its title too."""
    texts = (text, text.removeprefix(f"{title}\n")) if title and text.startswith(f"{title}\n") else (text,)
    return [core for core in map(str.strip, texts) if len(core) >= LEAST_CHARACTERS]


def find_passages(text: str, role: str, stored: StoredTexts | None = None) -> list[Passage]:
    """The passages in a message, in order, without overlap; none in what the assistant said.

    Args:
        text: the message's.
        role: of the message; "user" for the text of a completion.
        stored: the stored chunks' texts; None for none.
    """
    if role == "assistant" or len(text) < LEAST_CHARACTERS:
        return []
    known = [] if stored is None else stored.find(text)
    strings = text.lstrip()[:1] in ("[", "{") and role == "tool"
    borders = iter([*known, Passage(len(text) + 1, len(text) + 1, "")])
    found, border = list[Passage](), next(borders)
    blocks = list(_strings(text) if strings else _blocks(text, role))
    certain = [one for one in blocks if one.reason not in ("paragraph", "numbered")]
    if len(certain) < len(blocks) and sum(map(bool, map(_CODE_LINE.match, text.split("\n")))) >= CODE_LINES:
        blocks = certain
    for passage in blocks:
        while border.end <= passage.start:
            found.append(border)
            border = next(borders)
        if passage.end <= border.start:
            found.append(passage)
    return [*found, *(one for one in (border, *borders) if one.reason)]


def _strings(text: str) -> Iterator[Passage]:
    """The long texts in JSON, as they are written there; what they are is judged without their escapes."""
    start = None
    for mark in _STRING_MARK.finditer(text):
        if mark[0] == '"':
            if start is not None and mark.start() - start <= MOST_CHARACTERS:
                plain = text[start : mark.start()]
                with suppress(ValueError):  # no JSON: judged as it is written
                    plain = json.loads(f'"{plain}"', strict=False)
                if is_prose(plain, 1):
                    yield Passage(start, mark.start(), "json")
            start = mark.end() if start is None else None


def _blocks(text: str, role: str) -> Iterator[Passage]:
    """The texts in the forms of `FORMS` and `TAGS`, and paragraphs of several sentences between others."""
    bodies = (
        (opens, closes)
        for opens, closes in pairwise(_TAG.finditer(text))
        if closes["close"] and not opens["close"] and opens["name"] == closes["name"]
    )
    done, form = 0, "after" if role == "tool" else "head"
    for opens, closes in bodies:
        yield from _paragraphs(text, done, opens.start(), form, role)
        start, done, form = opens.end(), closes.end(), "after"
        if opens["name"].lower() in LISTS.split():
            yield from _paragraphs(text, start, closes.start(), "tag", role)
        elif is_prose(text[start : closes.start()], 1):
            yield _stripped(text, start, closes.start(), "tag")
    yield from _paragraphs(text, done, len(text), form, role)


def _paragraphs(text: str, begun: int, stop: int, form: str, role: str) -> Iterator[Passage]:
    """Passages among the lines from `begun` to `stop`; `form` is what stands before them.

    That is one of `FORMS`, "end" for one of `ENDS`, "tag" within one of `LISTS`, "head" at the beginning of a prompt, whose
    first paragraph is no passage, or else "after".
    """
    start, fenced = begun, False
    while start < stop:
        end = text.find("\n", start, stop)
        end = stop if end < 0 else end
        line = text[start:end]
        mark = _LINE.match(line)
        if mark is not None or not line.strip():  # a paragraph has ended
            kind = None if mark is None else mark.lastgroup
            if not fenced:
                yield from _paragraph(text, begun, start, form)
            fenced ^= kind == "fence"
            if text[begun:start].strip() and (form in ("head", "numbered", "labelled") or (form, kind) == ("context", "rule")):
                form = "after"
            begun = start + mark.end() if mark is not None and kind in (*FORMS, "end") else end + 1
            form = kind if kind in (*FORMS, "end") else form
        start = end + 1
    is_question = role == "user" and stop == len(text) and form in ("after", "context")
    if not fenced and not is_question:
        yield from _paragraph(text, begun, stop, form)


def _paragraph(text: str, start: int, end: int, form: str) -> Iterator[Passage]:
    part = text[start:end]
    if form in ("tag", *FORMS) and is_prose(part, 1):
        yield _stripped(text, start, end, form)
    elif form == "after" and is_prose(part, PARAGRAPH_SENTENCES, PARAGRAPH_CHARACTERS) and not _is_example(part.strip()):
        yield _stripped(text, start, end, "paragraph")


def _is_example(text: str) -> bool:
    """Whether a paragraph instructs, ends with an example's answer, or is a list, table or log whose lines are sentences."""
    answer, lines = _ANSWER.search(text), text.split("\n")
    has_answer = answer is not None and len(answer[0]) <= 2 * answer.start()
    ended = sum(_SENTENCE_END.search(line.rstrip()[-2:]) is not None for line in lines)
    return has_answer or ended > max(3, len(lines) - 2) or len(_INSTRUCTS.findall(text.lower())) >= 3


def _stripped(text: str, start: int, end: int, reason: str) -> Passage:
    part = text[start:end]
    return Passage(start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip()), reason)


def is_prose(text: str, sentences: int, characters: int = LEAST_CHARACTERS) -> bool:
    """Whether a text has so many sentences and characters at least, and is no code, table, list, log or verse."""
    text = text.strip()
    size = len(text)
    if not characters <= size <= MOST_CHARACTERS:
        return False
    lines = text.count("\n") + 1
    return (
        sum(map(text.count, _CODE)) * 40 <= size
        and sum(map(text.count, "0123456789")) * 8 <= size
        and (lines <= 3 or size >= 45 * lines)
        and len(_SENTENCE_END.findall(text)) >= sentences
    )
