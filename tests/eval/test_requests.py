"""Requests: files are read or refused, long cases are cut by the rule, sets and presets make the prompts they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_files import case, write
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.eval.data import (
    PRESETS,
    Example,
    FileSource,
    Passage,
    Task,
    WorldSource,
    find_file,
    make_request,
    read_examples,
)
from cacheblend.eval.data.wording import WORLD
from cacheblend.eval.world import make_cases, prompt_of
from cacheblend.eval.world.tokens import make_tokenizer
from cacheblend.store.errors import ConfigError, InputError, PromptTooLongError

EXAMPLE = Example("1", "Who?", ("she",), (Passage("", "text"),), Task.QA)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": ', "not JSON"),
        ("[1]", "not an example"),
        (json.dumps(case(1, answers=[])), '"answers"'),
        (json.dumps(case(1, passages=[])), '"passages"'),
        (json.dumps(case(1, passages=[{"title": "t"}])), "passage"),
        (json.dumps(case(1, task="poem")), "'poem'"),
        (json.dumps(case(1, question=" ")), '"question"'),
        (json.dumps(case(1, id="")), '"id"'),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    """A line that is no example is named by file and line, with what is wrong."""
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(case(0)) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"some\.jsonl, line 2") as error:
        list(read_examples(path))
    assert says in str(error.value)


def test_a_torn_gzip_is_refused(tmp_path: Path) -> None:
    """Half a gzip file is an error, not half a data set."""
    path = write(tmp_path, "squad_shared", [case(index, note="x" * index * 37) for index in range(300)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read behind line"):
        list(read_examples(path))


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
    with pytest.raises(ConfigError, match="one of world, musique"):
        find_file("trivia", None)


def test_long_cases_lose_chunks_from_the_middle() -> None:
    """Middle chunks go first, then the end of the last one left; what went is counted, and the question is never cut."""
    chunks = [[index] * 10 for index in range(5)]
    whole = make_request(EXAMPLE, [0], chunks, [9, 9], 53)
    assert (whole.pieces.chunks, whole.dropped_chunks, whole.cut_tokens) == (tuple(map(tuple, chunks)), 0, 0)
    fewer = make_request(EXAMPLE, [0], chunks, [9, 9], 52)
    assert ([chunk[0] for chunk in fewer.pieces.chunks], fewer.dropped_chunks, fewer.cut_tokens) == ([0, 1, 3, 4], 1, 10)
    one = make_request(EXAMPLE, [0], chunks, [9, 9], 9)
    assert (one.pieces.chunks, one.dropped_chunks, one.cut_tokens) == (((0,) * 6,), 4, 44)
    with pytest.raises(PromptTooLongError, match="case 1"):
        make_request(EXAMPLE, [0], chunks, [9, 9], 3)


def test_a_world_prompt_is_the_readers() -> None:
    """BOS, instruction, chunks and question: the very ids of the text as a whole."""
    tokenizer = make_tokenizer()
    source = WorldSource(seed=5, cases=4)
    for request, case_ in zip(source.requests(tokenizer, None), make_cases(5, 4), strict=True):
        text = WORLD.instruction + "".join(chunk.text for chunk in case_.chunks) + prompt_of(case_.question)
        assert list(request.pieces.token_ids) == [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        assert request.example.answers == case_.answers
        assert request.example.category == case_.question_class


def test_the_papers_prompt(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """A case's own passages are split, the nearest chunk stands first, and the question asks for five words."""
    write(tmp_path, "musique", [case(3), case(4)])
    tokenizer = tiny_tokenizer()
    requests = list(FileSource(name="musique", data=str(tmp_path)).requests(tokenizer, None, embedder))
    assert [request.example.id for request in requests] == ["case-3", "case-4"]
    for request, number in zip(requests, (3, 4), strict=True):
        assert tokenizer.decode(request.pieces.chunks[0]).startswith(f"Title {number}")
        assert tokenizer.decode(request.pieces.tail).startswith(
            f"Question: Where does person {number} live? Answer within 5 words."
        )
        assert max(map(len, request.pieces.chunks)) <= 516
    assert len(list(FileSource(name="musique", data=str(tmp_path), cases=1).requests(tokenizer, None, embedder))) == 1


def test_the_extended_preset_shares_a_corpus(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """Cases come shuffled by the seed, the first sixth as warm-up, with chunks of all cases' passages."""
    write(tmp_path, "2wikimqa_shared", [case(index) for index in range(12)])
    source = FileSource(name="2wikimqa_shared", data=str(tmp_path), preset=PRESETS["extended"])
    requests = list(source.requests(tiny_tokenizer(), None, embedder))
    ids = [request.example.id for request in requests]
    assert sorted(ids) == sorted(f"case-{index}" for index in range(12))
    assert ids != [f"case-{index}" for index in range(12)]
    assert [request.is_warm_up for request in requests] == [True] * 2 + [False] * 10
    assert all(len(request.pieces.chunks) == 6 for request in requests)  # more than a case has
    again = FileSource(name="2wikimqa_shared", data=str(tmp_path), preset=PRESETS["extended"], seed=1)
    seen: list[tuple[int, int]] = []
    others = again.requests(tiny_tokenizer(), None, embedder, on_corpus=lambda *step: seen.append(step))
    assert [request.example.id for request in others] != ids
    assert seen[-1] == (24, 24)


def test_few_shot_examples_are_chunks(tmp_path: Path, embedder: FakeEmbedder) -> None:
    """SAMSum's passages stay whole and in order, cut to 3,400 tokens from the middle, and the dialogue is the question."""
    passages = [{"title": "", "text": f"Dialogue: number {index} " + "talk " * 100 + "\nSummary: talk"} for index in range(40)]
    write(tmp_path, "samsum", [case(0, passages=passages, question="Dialogue: hello", task="summarization")])
    tokenizer = tiny_tokenizer()
    (request,) = FileSource(name="samsum", data=str(tmp_path)).requests(tokenizer, None, embedder)
    assert len(request.pieces.token_ids) <= 3400 < len(request.pieces.token_ids) + request.cut_tokens
    texts = [tokenizer.decode(chunk) for chunk in request.pieces.chunks]
    assert texts[0].startswith("Dialogue: number 0 ")
    assert texts[-1].startswith("Dialogue: number 39 ")
    assert tokenizer.decode(request.pieces.tail) == "Dialogue: hello\nSummary:"
    with pytest.raises(ConfigError, match="extended"):
        FileSource(name="samsum", preset=PRESETS["extended"])
