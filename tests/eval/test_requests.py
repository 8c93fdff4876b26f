"""Requests: files are read or refused, long cases are cut by the rule, sets and presets make the prompts they say."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_files import case, write
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import ConfigError, InputError, PromptTooLongError
from cacheblend.eval.data import (
    DATA_SETS,
    ORDERS,
    PRESETS,
    Example,
    FileSource,
    Passage,
    Preset,
    Request,
    Task,
    arrange,
    find_file,
    make_request,
    read_examples,
)
from cacheblend.eval.data.documents_source import read_questions
from cacheblend.eval.data.source import EXAMPLES, SHORT_ANSWER, prompt_renderer
from cacheblend.service.engine.prompt import PromptTokens

DATA = Path(os.environ.get("CACHEBLEND_DATA", Path(__file__).parents[3] / "shared" / "data"))
EXAMPLE = Example("1", "Who?", ("she",), (Passage("", "text"),), Task.QA)


@pytest.mark.parametrize(
    ("read", "line", "says"),
    [
        (read_examples, '{"id": ', "not JSON"),
        (read_examples, "[1]", "not an example"),
        (read_examples, json.dumps(case(1, answers=[])), '"answers"'),
        (read_examples, json.dumps(case(1, passages=[])), '"passages"'),
        (read_examples, json.dumps(case(1, passages=[{"title": "t"}])), "passage"),
        (read_examples, json.dumps(case(1, task="poem")), "'poem'"),
        (read_examples, json.dumps(case(1, question=" ")), '"question"'),
        (read_examples, json.dumps(case(1, id="")), '"id"'),
        (read_questions, '{"question": ', "not JSON"),
        (read_questions, '["Who?"]', "not a question"),
        (read_questions, '{"answers": ["she"]}', '"question"'),
        (read_questions, '{"question": " "}', '"question"'),
        (read_questions, '{"question": "Who?", "answers": "she"}', '"answers"'),
        (read_questions, '{"question": "Who?", "answers": [""]}', '"answers"'),
        (read_questions, '{"question": "Who?", "id": 7}', '"id"'),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, read: Any, line: str, says: str) -> None:
    """A line that is no example, or no question, is named by file and line, with what is wrong."""
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(case(0)) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"some\.jsonl, line 2") as error:
        list(read(path))
    assert says in str(error.value)


def test_what_is_absent_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its file a data set names source, file and option; a folder, the file and the environment lead to it."""
    monkeypatch.delenv("CACHEBLEND_DATA", raising=False)
    for place in (None, str(tmp_path)):
        with pytest.raises(InputError, match=r"LongBench.*2wikimqa_longbench100.jsonl.*--data or CACHEBLEND_DATA"):
            find_file("2wikimqa", place)
    path = write(tmp_path, "2wikimqa", [case(0)])
    assert find_file("2wikimqa", str(path)) == find_file("2wikimqa", str(tmp_path)) == path
    monkeypatch.setenv("CACHEBLEND_DATA", str(tmp_path))
    assert find_file("2wikimqa", None) == path
    (tmp_path / "hotpotqa_dev50.jsonl").write_text("")
    assert find_file("hotpotqa", None).name == "hotpotqa_dev50.jsonl", "the number of its cases may stand in the name"
    with pytest.raises(ConfigError, match="one of musique"):
        find_file("trivia", None)


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_real_data(name: str) -> None:
    """Where a real set is at hand, it is read to its end, ids are unique, and it has as many cases as it says, or half."""
    try:
        examples = list(read_examples(find_file(name, str(DATA))))
    except InputError as error:
        pytest.skip(f"{error} ({DATA}{'' if 'CACHEBLEND_DATA' in os.environ else ', as CACHEBLEND_DATA is unset'})")
    assert len({example.id for example in examples}) == len(examples)
    assert DATA_SETS[name].cases / 2 <= len(examples) <= DATA_SETS[name].cases


def test_long_cases_lose_chunks_from_the_middle() -> None:
    """Middle chunks go first, then the end of the last one left; what went is counted, and the question is never cut."""
    chunks = [[index] * 10 for index in range(5)]
    whole = make_request(EXAMPLE, [0], chunks, [9, 9], 53)
    assert (whole.prompt.chunk_ids, whole.dropped_chunks, whole.cut_tokens) == (tuple(map(tuple, chunks)), 0, 0)
    fewer = make_request(EXAMPLE, [0], chunks, [9, 9], 52)
    assert ([chunk[0] for chunk in fewer.prompt.chunk_ids], fewer.dropped_chunks, fewer.cut_tokens) == ([0, 1, 3, 4], 1, 10)
    one = make_request(EXAMPLE, [0], chunks, [9, 9], 9)
    assert (one.prompt.chunk_ids, one.dropped_chunks, one.cut_tokens) == (((0,) * 6,), 4, 44)
    with pytest.raises(PromptTooLongError, match="case 1"):
        make_request(EXAMPLE, [0], chunks, [9, 9], 3)


def requests(folder: Path, embedder: FakeEmbedder, name: str, **options: Any) -> list[Request]:
    """The requests of a data set in a folder, in the tiny tokenizer's tokens."""
    return list(FileSource(name=name, data=str(folder), **options).requests(tiny_tokenizer(), None, embedder))


def texts_of(request: Request) -> list[str]:
    return [tiny_tokenizer().decode(chunk) for chunk in request.prompt.chunk_ids]


def test_the_papers_prompt(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """A case's own passages are split, the nearest chunk stands first, and the question asks for five words."""
    write(tmp_path, "musique", [case(3), case(4)])
    for request, number in zip(requests(tmp_path, embedder, "musique"), (3, 4), strict=True):
        assert request.example.id == f"case-{number}"
        assert texts_of(request)[0].startswith(f"Title {number}")
        asked = f"Question: Where does person {number} live? Answer within 5 words."
        assert tiny_tokenizer().decode(request.prompt.suffix).startswith(asked)
        assert max(map(len, request.prompt.chunk_ids)) <= 516
    assert len(requests(tmp_path, embedder, "musique", cases=1)) == 1


def test_the_extended_preset_shares_a_corpus(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """Cases come shuffled by the seed, the first sixth as warm-up, with chunks of all cases' passages."""
    write(tmp_path, "2wikimqa_shared", [case(index) for index in range(12)])
    given = requests(tmp_path, embedder, "2wikimqa_shared", preset=PRESETS["extended"])
    ids, in_order = [request.example.id for request in given], [f"case-{index}" for index in range(12)]
    assert ids != in_order
    assert sorted(ids) == sorted(in_order)
    assert [request.is_warm_up for request in given] == [True] * 2 + [False] * 10
    assert all(len(request.prompt.chunk_ids) == 6 for request in given)  # more than a case has
    again, seen = FileSource(name="2wikimqa_shared", data=str(tmp_path), preset=PRESETS["extended"], seed=1), list[Any]()
    others = again.requests(tiny_tokenizer(), None, embedder, on_corpus=lambda *step: seen.append(step))
    assert [request.example.id for request in others] != ids
    assert seen[-1] == (24, 24)


def test_few_shot_examples_are_chunks(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """SAMSum's passages stay in order and undivided, cut to 3,400 tokens from the middle, and the dialogue is the question."""
    passages = [{"title": "", "text": f"Dialogue: number {index} " + "talk " * 100 + "\nSummary: talk"} for index in range(40)]
    write(tmp_path, "samsum", [case(0, passages=passages, question="Dialogue: hello", task="summarization")])
    (request,) = requests(tmp_path, embedder, "samsum")
    assert len(request.prompt.token_ids) <= 3400 < len(request.prompt.token_ids) + request.cut_tokens
    first, *_, last = texts_of(request)
    assert first.startswith("Dialogue: number 0 ")
    assert last.startswith("Dialogue: number 39 ")
    assert tiny_tokenizer().decode(request.prompt.suffix) == "Dialogue: hello\nSummary:"
    with pytest.raises(ConfigError, match="extended"):
        FileSource(name="samsum", preset=PRESETS["extended"])


def test_passages_are_chunks(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """With passage chunking each passage, title and text, is one chunk in the file's order; num_chunks takes the first ones."""
    passages = [{"title": f"Title {index}", "text": f"Town {index} has a river. " * (40 + index)} for index in range(5)]
    write(tmp_path, "musique", [case(0, passages=passages)])
    write(tmp_path, "samsum", [case(0, passages=passages, task="summarization")])

    def chunks(name: str = "musique", **preset: Any) -> list[str]:
        (request,) = requests(tmp_path, embedder, name, preset=Preset(**preset))
        return texts_of(request)

    texts = [f"{passage['title']}\n{passage['text']}\n\n" for passage in passages]
    assert chunks(chunking="passage") == texts
    assert chunks(chunking="passage", num_chunks=3) == texts[:3]
    assert chunks(chunking="passage", order="reversed") == texts[::-1]
    split = chunks(chunking="split", chunk_tokens=128)
    assert len(split) == 6
    assert all(len(tiny_tokenizer()(text, add_special_tokens=False).input_ids) <= 132 for text in split)
    assert len(chunks("samsum", num_chunks=2)) == 2


@pytest.mark.parametrize("changes", [{"chunking": "word"}, {"order": "best"}, {"prompt": "haiku"}, {"num_chunks": 0}])
def test_presets_are_checked(changes: dict[str, object]) -> None:
    """A value that is not allowed is named with what is."""
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Preset(**changes)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="chunking"):
        Preset(shared_corpus=True, chunking="passage")


def test_orders_have_the_same_chunks() -> None:
    """Reversed and gold-middle move chunks with their documents; the gold chunk is the one in which an answer stands whole."""
    texts = ["nobody knows", "she said no.", "a river", "a town", "a hill"]
    complete = make_request(answered_by("No"), [0], [[index] for index in range(5)], [9], None, document_ids=list("abcde"))

    def order_of(request: Request, order: str) -> tuple[str, ...]:
        arranged = arrange(request, order, lambda chunk: texts[chunk[0]]).prompt
        assert [texts[chunk[0]] for chunk in arranged.chunk_ids] == [texts["abcde".index(id_)] for id_ in ids_of(arranged)]
        assert (arranged.prefix, arranged.suffix) == ((0,), (9,))
        return ids_of(arranged)

    assert [order_of(complete, order) for order in ORDERS] == [tuple("abcde"), tuple("edcba"), tuple("acbde")]
    other = replace(complete, example=answered_by("sea", ""))
    assert order_of(other, "gold-middle") == tuple("abcde")


def ids_of(prompt: PromptTokens) -> tuple[str, ...]:
    return tuple(chunk.document[0] for chunk in prompt.chunks if chunk.document is not None)


def answered_by(*answers: str) -> Example:
    return Example("1", "Who?", answers, (), Task.QA)


def test_base_models_get_worked_examples() -> None:
    """A plain text begins with worked examples in the question's own words; a chat template takes their place."""
    plain, chat = copy.copy(tiny_tokenizer()), copy.copy(tiny_tokenizer())
    chat.chat_template = "<s>user: {{ messages[0]['content'] }}</s>assistant: "
    for tokenizer, prompt, has_examples in (
        (plain, "auto", True),
        (plain, "few-shot", True),
        (chat, "auto", False),
        (chat, "chat", False),
        (chat, "few-shot", True),
    ):
        renderer = prompt_renderer(tokenizer, replace(SHORT_ANSWER, prompt=prompt))
        head = tokenizer.decode(renderer.prefix)
        assert all((question in head) == (f"Answer: {answer}\n\n" in head) == has_examples for question, answer in EXAMPLES)
        assert head.startswith("<s>user:") != has_examples
        assert tokenizer.decode(renderer.question("Who?").suffix).endswith("Answer:") == has_examples
    with pytest.raises(ConfigError, match="chat template"):
        prompt_renderer(plain, replace(SHORT_ANSWER, prompt="chat"))
