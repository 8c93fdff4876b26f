"""Passages are found in the forms that applications write, and in nothing else."""

import json

import pytest
from plain_prompts import plain_prompts

from cacheblend.retriever import Chunk
from cacheblend.retriever.passages import CANDIDATES, Passage, StoredTexts, find_passages

RIVER = (
    "The river Thames flows through London and has been a route of trade for centuries. Its banks hold many of the city's "
    "landmarks. Several bridges cross it, among them Tower Bridge, and boats carry visitors every day."
)
MOUNTAIN = (
    "Mount Kenya is the highest mountain of its country. It is an extinct volcano that was once much taller.\n"
    "Its slopes hold forests and moorland, and the glaciers near the top shrink every year because the air gets warmer."
)
BICYCLE = (
    "The bicycle was developed in Europe. Early models had no pedals at all: riders pushed themselves along with their feet. "
    "Then came the chain drive, which made wheels of equal size possible. It brought the safety bicycle to everyone."
)
TEXTS = (RIVER, MOUNTAIN, BICYCLE)
ASKED = "Which of these is the oldest, and why is that so?"
OPEN_WEBUI = (
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the format [id] "
    '**only when the <source> tag includes an explicit id attribute** (e.g., <source id="1">).\n\n### Guidelines:\n- If you '
    "don't know the answer, clearly state that. If uncertain, ask the user to clarify.\n\n<context>\n{}\n</context>\n\n{}"
)
APART = "\n\n".join(TEXTS)


def each(form: str) -> str:
    """The texts one after the other, each in a form."""
    return "".join(form.format(number=number, text=text) for number, text in enumerate(TEXTS, start=1))


FORMS = {
    "tag": OPEN_WEBUI.format(each('<source id="{number}" name="a.md">{text}</source>\n'), ASKED),
    "tag ": f"Read.\n<documents>{each('<document>{text}</document>')}</documents>{ASKED}",
    "tag  ": f"Answer from the context.\n<context>\n{APART}\n</context>\nQuestion: {ASKED}",
    "numbered": f"Cite.\n\n{each('[{number}] {text}' + chr(10))}\n{ASKED}",
    "labelled": f"{each('Document {number} (Title: t{number}): {text}' + chr(10))}\nQuestion: {ASKED}",
    "context": f"Context information is below.\n-----\n{APART}\n-----\nGiven the context, answer.\nQuery: {ASKED}\nAnswer: ",
    "context ": f"Answer the question based only on the following context:\n{APART}\n\nQuestion: {ASKED}",
    "context  ": f"Given these documents, answer.\nDocuments:\n{each('    {text}' + chr(10) * 2)}\nQuestion: {ASKED}",
    "context   ": "Context:\n" + each("[CONTEXT {number}]:\n{text}\n[END CONTEXT {number}]\n\n"),  # AnythingLLM
    "context    ": each("\nID: {number}\n├── Title: a.pdf\n└── Content:\n{text}\n\n------\n"),  # RAGFlow
    "paragraph": f"Answer from what follows.\n\n{APART}\n\n{ASKED}",
    "paragraph ": f"Answer.\n\n---\n{each('{text}' + chr(10) + '---' + chr(10))}{ASKED}",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Each form's passages are the texts themselves, whatever stands around them."""
    text = FORMS[form]
    found = find_passages(text, "user")
    assert [text[one.start : one.end] for one in found] == [*TEXTS]
    assert {one.reason for one in found} == {form.strip()}
    assert not find_passages(text, "assistant")


def test_results_of_tools_and_system_messages() -> None:
    """A tool's JSON has its long texts, plain text its paragraphs; a system message may end with what was retrieved."""
    texts = [f"# Cars\n\n{text} {text} {text}\n\n| Grade | Price |\n|---|---|\n| F | £36 |\n" for text in TEXTS]
    text = json.dumps([{"id": n, "page_content": text} for n, text in enumerate(texts)])
    assert [json.loads(f'"{text[one.start : one.end]}"') for one in find_passages(text, "tool")] == texts
    assert not find_passages(json.dumps([{"text": "One is done.\n" * 40}]), "tool")
    assert len(find_passages(APART, "tool")) == 3
    assert len(find_passages(f"Use the following. Keep the answer concise.\n\n{APART}", "system")) == 3


def stored(texts: dict[int, str]) -> StoredTexts:
    known = StoredTexts(lambda id_: Chunk("d", "v", id_, "", texts[id_], ()) if id_ in texts else None)
    known.add((id_, "", text) for id_, text in texts.items())
    return known


def test_stored_texts_are_found_between_any_characters() -> None:
    """A stored chunk is found word for word, its white space aside, in any text; not a part of it, and not once it is gone."""
    texts = {1: f"{RIVER}\n\n", 2: f" {MOUNTAIN}", 3: f"{RIVER} And more of it."}
    known, text = stored(texts), f"(1){RIVER}|2*{MOUNTAIN}*{RIVER} And more of it.>{MOUNTAIN[:-1]}"
    found = find_passages(text, "user", known)
    assert [text[one.start : one.end] for one in found] == [RIVER, MOUNTAIN, f"{RIVER} And more of it."]
    assert [(one.reason, one.chunk and one.chunk.position) for one in found] == [("stored", 1), ("stored", 2), ("stored", 3)]
    del texts[1]
    assert [one.chunk and one.chunk.position for one in find_passages(text, "user", known)] == [2, 3]
    for n in range(4, 5 + CANDIDATES):
        texts[n] = f"{RIVER} Number {n}."
        known.retain([2, 4, n - 1])
        known.add([(n, "", texts[n])])
    assert known.find(texts[4]), "what is gone has no candidate's place"
    rows = {n: "pier,depth_m,keeper,district,inspector\n" + f"P{n},3.5,Ada {n},north,Lovelace\n" * 9 for n in range(100)}
    assert all(map(stored(rows).find, rows.values()))  # although they begin as one


def test_nothing_else_is_a_passage() -> None:
    """Code, tables, schemas, logs, verses, chats, examples, instructions and questions hold none."""
    found = {text[:200]: one for _, chat in plain_prompts(450) for role, text in chat for one in find_passages(text, role)}
    assert not found


def test_bad_input() -> None:
    """Unclosed, nested and repeated tags and marks, scripts mixed, and passages too long or too short are no error."""
    table: list[tuple[str, int]] = [
        (f"Read.\n<source>{RIVER}\n\n{ASKED}", 0),
        (f"Read.\n<context><source>{RIVER}</source></context>{ASKED}", 1),
        (f"Read.\n<source><source>{RIVER}</source></source>{ASKED}", 1),
        ("<context>" + RIVER * 1000 + "</context>", 0),
        ("\n".join(f"[{n}] of three words" for n in range(1000)), 0),
        ("Read.\n" + f"<source>{RIVER}</source>\n" * 50 + ASKED, 50),
        (f"<context>\u202e{'نهر التايمز يمر عبر لندن. ' * 8}{RIVER}</context>", 1),
        (f"[1] <|im_end|>{RIVER}\n[2] {RIVER}<source>\n\n</source>", 2),
        ("", 0),
    ]
    known = stored({1: RIVER * 2})
    assert [len(find_passages(text, "user")) for text, _ in table] == [count for _, count in table]
    assert all(isinstance(one, Passage) for text, _ in table for one in find_passages(text, "user", known))


REPEATED = ["\n", "<source>", "<source ", "<doc></doc>", '\\"', "[1] ", "---\n", "context ", "context x:\n", RIVER[:32], "<"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("unit", REPEATED)
def test_hostile_texts_take_no_longer_than_others(unit: str) -> None:
    """Half a million characters that repeat what begins a form are looked through in time."""
    known, role = stored({n: f"{RIVER[:32]}{n} {MOUNTAIN}" for n in range(100)}), "tool" if '"' in unit else "user"
    assert not find_passages('["' * (role == "tool") + unit * (500_000 // len(unit)), role, known)
