from pathlib import Path
from typing import Any

import pytest
from engines import DOCUMENTS, ODD_DOCUMENTS, QUESTION, TOP_K, OpenEngine, furthest, kinds, prompt_of
from fakes import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from cacheblend.base.errors import InputError
from cacheblend.blend import Fusor
from cacheblend.retriever import Chunk, Document, RetrieverConfig, Splitter
from cacheblend.service.engine.prompt import PromptBuilder

BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}<<SYS>>be kind</s><</SYS>>{% for message in messages %}[{{ message.role }}] {{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>[assistant] {% endif %}"
)
INSTRUCTION = "Read this.\n\n"


def tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A copy of the tiny tokenizer, with a chat template of its own."""
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    copy = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **special)
    copy.chat_template = template
    return copy


def split(documents: list[dict[str, object]], chunk_tokens: int = 12) -> list[Chunk]:
    splitter = Splitter(tokenizer(), RetrieverConfig(chunk_tokens=chunk_tokens))
    return [chunk for document in documents for chunk in splitter.split(Document.of(document))]


@pytest.fixture(params=[None, TEMPLATE], ids=["no template", "template"])
def builder(request: pytest.FixtureRequest) -> PromptBuilder:
    return PromptBuilder(tokenizer(request.param), INSTRUCTION)


def test_without_template() -> None:
    """Without a template a prompt is BOS, instruction, chunks and question, and reads as such."""
    builder = PromptBuilder(tokenizer(), INSTRUCTION)
    chunks = split(DOCUMENTS[:2])
    pieces = builder.build(chunks, f"  {QUESTION}\n")
    text = "".join(f"{chunk.text}\n\n" for chunk in chunks)
    assert tokenizer().decode(pieces.token_ids) == f"<s>{INSTRUCTION}{text}Question: {QUESTION}\nAnswer:"
    assert tokenizer().decode(pieces.head) == f"<s>{INSTRUCTION}"
    assert pieces.token_ids.count(BOS) == 1


def test_with_template() -> None:
    """With a template a prompt reads as the template renders it, special tokens of its own included."""
    builder = PromptBuilder(tokenizer(TEMPLATE), INSTRUCTION)
    chunks = split(DOCUMENTS[:2])
    pieces = builder.build(chunks, QUESTION)
    content = f"{INSTRUCTION}{''.join(f'{chunk.text}' + chr(10) * 2 for chunk in chunks)}Question: {QUESTION}"
    rendered = tokenizer(TEMPLATE).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer().decode(pieces.token_ids) == rendered
    assert (pieces.head[0], pieces.head.count(EOS)) == (BOS, 1)
    assert [token for token in pieces.tail if token in (BOS, EOS)] == [EOS, BOS]


def test_chunks_keep_their_ids(builder: PromptBuilder) -> None:
    """Chunks stand in the prompt with the very ids that they were split into, wherever they stand."""
    chunks = split([*ODD_DOCUMENTS, *DOCUMENTS])
    for order in (chunks, chunks[::-1], [*chunks[:2], *chunks[:2]]):
        pieces = builder.build(order, QUESTION)
        assert pieces.chunks == tuple(chunk.token_ids for chunk in order)
        assert pieces.token_ids == (*pieces.head, *(token for chunk in order for token in chunk.token_ids), *pieces.tail)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_special_tokens_in_texts_stay_text(template: str | None) -> None:
    """The text of special tokens in an instruction, a document or a question is text, and reads as it was."""
    plain = PromptBuilder(tokenizer(template), "Read this: ")
    loaded = PromptBuilder(tokenizer(template), "Read </s> this: ")
    pieces = loaded.build(split([{"text": "a </s> and <s> b"}]), "what is <s> or </s>?")
    specials = [token for token in plain.build([], "what?").token_ids if token in (BOS, EOS)]
    assert [token for token in pieces.token_ids if token in (BOS, EOS)] == specials
    assert [token for token in loaded.head if token in (BOS, EOS)] == [token for token in plain.head if token in (BOS, EOS)]
    for text in ("Read </s> this: ", "a </s> and <s> b", "what is <s> or </s>?"):
        assert text in tokenizer().decode(pieces.token_ids)


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
        PromptBuilder(tokenizer(template), INSTRUCTION)


def test_a_template_that_trims() -> None:
    """A template that trims white space around the message changes nothing of the pieces."""
    trimmed = TEMPLATE.replace("message.content", "message.content | trim")
    pieces = [PromptBuilder(tokenizer(template), " Read.\n").build(split(DOCUMENTS), "a?") for template in (TEMPLATE, trimmed)]
    assert pieces[0] == pieces[1]


def test_heads() -> None:
    """Chunks are computed after what every prompt begins with, template and instruction included; where that is nothing, so."""
    for template in (None, TEMPLATE):
        for instruction in ("", INSTRUCTION):
            builder = PromptBuilder(tokenizer(template), instruction)
            pieces = [builder.build(split(documents), "what?") for documents in (DOCUMENTS[:1], DOCUMENTS[1:3])]
            assert {one.token_ids[: len(builder.head)] for one in pieces} == {builder.head}
            assert builder.head[0] == BOS
            text = tokenizer().encode(instruction, add_special_tokens=False)
            assert builder.head[len(builder.head) - len(text) :] == tuple(text)
    assert PromptBuilder(tokenizer(eos_token="</s>"), "").head == ()


@pytest.mark.parametrize("question", ["", "  \n", None, 3])
def test_no_question(builder: PromptBuilder, question: Any) -> None:
    """An empty question, and one that is not text, is refused."""
    with pytest.raises(InputError, match="question"):
        builder.build(split(DOCUMENTS), question)


def test_engine_with_template(fusor: Fusor, open_engine: OpenEngine) -> None:
    """An engine whose model has a chat template reuses chunks, and is exact where it must be."""
    templated = Fusor(fusor.model, tokenizer(TEMPLATE), fingerprint=fusor.fingerprint)
    engine = open_engine(fusor=templated)
    engine.ingest(DOCUMENTS)
    blend = engine.answer(QUESTION, top_k=TOP_K, recompute_ratio=1.0)
    full = engine.answer(QUESTION, top_k=TOP_K, method="full_recompute")
    assert kinds(blend) == ["exact", *["reused"] * TOP_K, "fresh"]
    assert prompt_of(blend.plan) == prompt_of(full.plan)
    assert tokenizer().decode(prompt_of(full.plan)).startswith("<s><<SYS>>be kind</s>")
    assert furthest(blend, full) <= 1e-4
    assert blend.token_ids == full.token_ids


def test_template_files(model_dir: Path) -> None:
    """The tokenizer of a model directory has no template unless the directory brings one."""
    assert PreTrainedTokenizerFast.from_pretrained(model_dir).chat_template is None
