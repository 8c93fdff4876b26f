"""Prompts of questions, chats and texts: what stands around the chunks, and that no text becomes a template."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from engines import DOCUMENTS, ODD_DOCUMENTS, QUESTION, TOP_K, OpenEngine, furthest, kinds, prompt_of
from fakes import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from cacheblend.base.errors import InputError
from cacheblend.blend import Fusor
from cacheblend.retriever import Chunk, Document, RetrieverConfig, Splitter
from cacheblend.service.engine.prompt import Message, PromptChunk, PromptRenderer, PromptTokens

BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}<<SYS>>be kind</s><</SYS>>{% for message in messages %}[{{ message.role }}] {{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>[assistant] {% endif %}"
)
INSTRUCTION = "Read this.\n\n"
CHAT_INSTRUCTION = "Answer from these.\n"
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "


def tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A copy of the tiny tokenizer, with a chat template of its own."""
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    copy = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **special)
    copy.chat_template = template
    return copy


def split(documents: list[dict[str, object]], chunk_tokens: int = 12) -> list[Chunk]:
    splitter = Splitter(tokenizer(), RetrieverConfig(chunk_tokens=chunk_tokens))
    return [chunk for document in documents for chunk in splitter.split(Document.of(document))]


def over(layout: PromptTokens, chunks: Iterable[Chunk]) -> PromptTokens:
    return replace(layout, chunks=tuple(PromptChunk(chunk.token_ids) for chunk in chunks))


@pytest.fixture(params=[None, TEMPLATE], ids=["no template", "template"])
def renderer(request: pytest.FixtureRequest) -> PromptRenderer:
    return PromptRenderer(tokenizer(request.param), INSTRUCTION)


def test_without_template() -> None:
    """Without a template a prompt is BOS, instruction, chunks and question, and reads as such."""
    renderer = PromptRenderer(tokenizer(), INSTRUCTION)
    chunks = split(DOCUMENTS[:2])
    prompt = over(renderer.question(f"  {QUESTION}\n"), chunks)
    text = "".join(f"{chunk.text}\n\n" for chunk in chunks)
    assert tokenizer().decode(prompt.token_ids) == f"<s>{INSTRUCTION}{text}Question: {QUESTION}\nAnswer:"
    assert tokenizer().decode(prompt.prefix) == f"<s>{INSTRUCTION}"
    assert prompt.token_ids.count(BOS) == 1


def test_with_template() -> None:
    """With a template a prompt reads as the template renders it, special tokens of its own included."""
    renderer = PromptRenderer(tokenizer(TEMPLATE), INSTRUCTION)
    chunks = split(DOCUMENTS[:2])
    prompt = over(renderer.question(QUESTION), chunks)
    content = f"{INSTRUCTION}{''.join(f'{chunk.text}' + chr(10) * 2 for chunk in chunks)}Question: {QUESTION}"
    rendered = tokenizer(TEMPLATE).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer().decode(prompt.token_ids) == rendered
    assert (prompt.prefix[0], prompt.prefix.count(EOS)) == (BOS, 1)
    assert [token for token in prompt.suffix if token in (BOS, EOS)] == [EOS, BOS]


def test_a_templates_date_is_not_in_the_prefix_of_all() -> None:
    """The prefix that names stored KV has a fixed date; a prompt has today's."""
    renderer = PromptRenderer(tokenizer("{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE), INSTRUCTION)
    assert "2025-01-01" in tokenizer().decode(renderer.prefix)
    assert "2025-01-01" not in tokenizer().decode(renderer.question(QUESTION).prefix)


def test_chunks_keep_their_ids(renderer: PromptRenderer) -> None:
    """Chunks stand in the prompt with the very ids that they were split into, wherever they stand."""
    chunks = split([*ODD_DOCUMENTS, *DOCUMENTS])
    for order in (chunks, chunks[::-1], [*chunks[:2], *chunks[:2]]):
        prompt = over(renderer.question(QUESTION), order)
        assert prompt.chunk_ids == tuple(chunk.token_ids for chunk in order)
        assert prompt.token_ids == (*prompt.prefix, *(token for chunk in order for token in chunk.token_ids), *prompt.suffix)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content[:20] }}",
        "{{ messages[0].content[40:] }}",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content }}{{ messages[0].content }}",
        "{{ messages[0].content }}|{{ messages[0].content[-40:] }}",
        "nothing of it",
        "{{ raise_exception('system message first') }}",
        "{{ messages[0].content",
        "{{ messages[7].content.parts }}",
    ],
)
def test_templates_that_change_the_message(template: str) -> None:
    """A template that cuts, changes, drops or doubles the message, or fails, is refused for that."""
    with pytest.raises(InputError, match="chat template"):
        PromptRenderer(tokenizer(template), INSTRUCTION)


def test_a_template_that_trims() -> None:
    """A template that trims white space around the message changes nothing of the prompt."""
    trimmed = TEMPLATE.replace("message.content", "message.content | trim")
    prompt = [
        over(PromptRenderer(tokenizer(template), "Read.\n").question("a?"), split(DOCUMENTS))
        for template in (TEMPLATE, trimmed)
    ]
    assert prompt[0] == prompt[1]


def test_heads() -> None:
    """Chunks are computed after what every prompt begins with, template and instruction included; where that is nothing, so."""
    for template in (None, TEMPLATE):
        for instruction in ("", INSTRUCTION):
            renderer = PromptRenderer(tokenizer(template), instruction)
            prompt = [over(renderer.question("what?"), split(documents)) for documents in (DOCUMENTS[:1], DOCUMENTS[1:3])]
            assert {one.token_ids[: len(renderer.prefix)] for one in prompt} == {renderer.prefix}
            assert renderer.prefix[0] == BOS
            text = tokenizer().encode(instruction, add_special_tokens=False)
            assert renderer.prefix[len(renderer.prefix) - len(text) :] == tuple(text)
    silent = tokenizer()  # it has BOS and does not put it in front, as Qwen's and SmolLM2's
    silent.backend_tokenizer.post_processor = None
    assert PromptRenderer(silent, "").prefix == ()
    assert silent.decode(PromptRenderer(silent, "").completion("Once").token_ids) == "Once"


@pytest.mark.parametrize("question", ["", "  \n", None, 3])
def test_no_question(renderer: PromptRenderer, question: Any) -> None:
    """An empty question, and one that is not text, is refused."""
    with pytest.raises(InputError, match="question"):
        renderer.question(question)


def test_engine_with_template(fusor: Fusor, open_engine: OpenEngine) -> None:
    """An engine whose model has a chat template reuses chunks, and is exact where it must be."""
    templated = Fusor(fusor.model, tokenizer(TEMPLATE), fingerprint=fusor.fingerprint)
    engine = open_engine(fusor=templated)
    engine.ingest(DOCUMENTS)
    blend = engine.answer(QUESTION, num_chunks=TOP_K, recompute_ratio=1.0)
    full = engine.answer(QUESTION, num_chunks=TOP_K, method="full_recompute")
    assert kinds(blend) == ["exact", *["reused"] * TOP_K, "fresh"]
    assert prompt_of(blend.plan) == prompt_of(full.plan)
    assert tokenizer().decode(prompt_of(full.plan)).startswith("<s><<SYS>>be kind</s>")
    assert furthest(blend, full) <= 1e-4
    assert blend.token_ids == full.token_ids


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE], ids=["plain", "template"])
def test_one_question(template: str | None) -> None:
    """A chat of one question over chunks has the prompt of the engine's own questions."""
    made = tokenizer(template)
    layout = PromptRenderer(made, CHAT_INSTRUCTION).chat([Message("user", " What? ")], with_chunks=True)
    assert layout == PromptRenderer(made, CHAT_INSTRUCTION).question("What?")


def test_turns() -> None:
    """The template's words stand around every turn, chunks before the last question, and special tokens of turns stay text."""
    made = tokenizer(CHAT_TEMPLATE)
    turns = [
        Message("system", "Be brief."),
        Message("user", "Hi </s>"),
        Message("assistant", "Hello"),
        Message("user", "What?"),
    ]
    layout = PromptRenderer(made, CHAT_INSTRUCTION).chat(turns, with_chunks=True)
    assert made.decode(layout.prefix) == "<s>system: Be brief.</s><s>user: Hi </s></s><s>assistant: Hello</s><s>user: "
    assert list(layout.prefix).count(made.eos_token_id) == 3
    assert made.decode(layout.suffix) == "Question: What?</s><s>assistant: "


@pytest.mark.parametrize("continues", [False, True])
def test_a_begun_answer_in_plain_text(continues: bool) -> None:
    """Without a template an answer that the assistant has begun is continued in any case; a question may be empty."""
    renderer = PromptRenderer(tokenizer(None), CHAT_INSTRUCTION)
    for question in ("What?", ""):
        turns = [Message("user", question), Message("assistant", "It is ")]
        suffix = renderer.chat(turns, with_chunks=True, continues=continues).suffix
        assert tokenizer().decode(suffix) == f"Question: {question}\nAnswer: It is"


@pytest.mark.parametrize(
    ("template", "turns", "named"),
    [
        (None, [], "one must be the user's"),
        ("{{ messages[0].content }}", [Message("system", "a"), Message("user", "b")], "drops or repeats"),
    ],
)
def test_turns_that_cannot_be_taken(template: str | None, turns: list[Message], named: str) -> None:
    """Turns that the model's template drops, or a chat without a question, are refused."""
    with pytest.raises(InputError, match=named):
        PromptRenderer(tokenizer(template), CHAT_INSTRUCTION).chat(turns, with_chunks=True)


def test_completion() -> None:
    """A text to continue stands after BOS and the place of the chunks; it may be a template of the client's own."""
    made = tokenizer(CHAT_TEMPLATE)
    prompt = PromptRenderer(made, CHAT_INSTRUCTION).completion("Once </s> upon")
    assert prompt.prefix == (made.bos_token_id,)
    assert list(prompt.token_ids) == made("Once </s> upon")["input_ids"]
    assert made.eos_token_id in prompt.suffix
