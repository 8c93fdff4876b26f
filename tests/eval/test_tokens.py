"""The reader's tokenizer: a word a token, any text there and back, chunks that can be put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheblend.eval.world.article import count_tokens
from cacheblend.eval.world.case import make_cases
from cacheblend.eval.world.names import PATTERNS
from cacheblend.eval.world.tokens import make_tokenizer

TOKENIZER = make_tokenizer()


def _ids(text: str, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_as_it_was(text: str):
    assert TOKENIZER.decode(_ids(text)) == text


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1).map(lambda line: line + "\n"), max_size=5
    )
)
def test_lines_tokenised_apart_are_the_tokens_of_the_whole(lines: list[str]):
    assert [token for line in lines for token in _ids(line)] == _ids("".join(lines))


def test_a_cases_chunks_and_question_tokenised_apart_are_the_tokens_of_the_prompt():
    for case in make_cases(1, 8):
        parts = [*(chunk.text for chunk in case.chunks), case.question]
        assert [token for part in parts for token in _ids(part)] == _ids("".join(parts))


def test_a_test_worlds_text_is_one_token_a_word_as_counted():
    for case in make_cases(1, 8):
        assert all(len(_ids(chunk.text)) == count_tokens(chunk.text) for chunk in case.chunks)


@pytest.mark.parametrize("place", ["{}", "{} is a firm", "it is {}.", "see\n{}", "{}'s"])
def test_a_name_is_the_same_tokens_wherever_it_stands(place: str):
    for pattern in PATTERNS.values():
        name = pattern.name(0, 0)
        alone, placed = _ids(name), _ids(place.format(name))
        assert any(placed[at : at + len(alone)] == alone for at in range(len(placed)))


def test_it_saves_and_loads_as_an_auto_tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = make_cases(1, 1)[0].chunks[0].text + "Zürich, 3.5\n"
    assert _ids(text, loaded) == _ids(text)
    assert loaded.decode(_ids(text)) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
