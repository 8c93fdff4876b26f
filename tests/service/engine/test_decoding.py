"""Text comes as soon as it is certain, and its pieces joined are the whole."""

import codecs

import pytest
from fakes import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cacheblend.service.engine.decoding import UNFINISHED, Sampling, TextStream, token_bytes


def stream(token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(tiny_tokenizer(), stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(text.add(token_id))
        if text.stop_string is not None:
            break
    return [*pieces, text.finish()], text


@given(st.lists(st.integers(0, len(tiny_tokenizer()) - 1), max_size=30))
def test_pieces_are_the_whole(token_ids: list[int]) -> None:
    """Whatever the tokens, the pieces joined are what the tokenizer decodes them to at once, but for a torn last character."""
    pieces, text = stream(token_ids)
    texts = b"".join(token_bytes(tiny_tokenizer(), token) for token in token_ids if token > 1)
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(texts)
    assert "".join(pieces) == text.text == whole
    assert tiny_tokenizer().decode(token_ids, skip_special_tokens=True).removesuffix(UNFINISHED) in (
        whole,
        whole.removesuffix(UNFINISHED),
    )


@pytest.mark.parametrize("words", ["naïve café 🙂 注意力", "plain words"])
def test_no_torn_character_is_given(words: str) -> None:
    """A character whose bytes come in several tokens is given whole."""
    token_ids = tiny_tokenizer()(words, add_special_tokens=False)["input_ids"]
    pieces, _ = stream(token_ids)
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == words


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop(words: str, stop: list[str]) -> None:
    """The text ends before the stop string that is complete first, and nothing of it is given before."""
    token_ids = [tiny_tokenizer().convert_tokens_to_ids(letter) for letter in words]
    pieces, text = stream(token_ids, tuple(stop))
    grown = (words[:length] for length in range(len(words) + 1))
    until = next(
        (part[: min(part.find(one) for one in stop if one in part)] for part in grown if any(one in part for one in stop)), None
    )
    assert (text.stop_string in stop) is (until is not None)
    assert "".join(pieces) == text.text == (words if until is None else until)


def test_stop_strings_wait_for_the_least_tokens() -> None:
    """A stop string in the text of the first tokens does not end the answer; the first one after it does."""
    text = TextStream(tiny_tokenizer(), ["ab"], min_tokens=4)
    pieces = [text.add(tiny_tokenizer().convert_tokens_to_ids(letter)) for letter in "abbabbab"]
    assert ("".join([*pieces[:8], text.finish()]), text.stop_string) == ("abbabb", "ab")


def test_a_named_penalty_is_the_models_no_more() -> None:
    """An option that is left out is the model's own, and 1 is none."""
    options = [Sampling(repetition_penalty=penalty).generation_options(tiny_tokenizer()) for penalty in (None, 1)]
    assert [repr(one.get("repetition_penalty")) for one in options] == ["None", "1.0"]  # a float, which `generate` wants


def test_a_continued_text_has_its_space() -> None:
    """A decoder that drops a first token's space does not drop that of one with a context, which is no part of the text."""
    words = Tokenizer(models.WordLevel({"\u2581is": 0, "\u2581Paris": 1, "?": 2}, "?"))
    words.decoder = decoders.Metaspace()
    for context, expected in (([], "Paris"), ([0], " Paris")):
        stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=words), ["a", "?"], min_tokens=1, context=context)
        assert [stream.add(1), stream.add(2), stream.stop_string] == [expected, "", "?"]


class CountingTokenizer:
    """Counts the tokens that it decodes; every token is the first byte of a character, or has no text."""

    def __init__(self, text: str) -> None:
        self.all_special_ids, self.decoded, self._text = [0], 0, text

    def convert_ids_to_tokens(self, _: int) -> str:
        return "\xc3"

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        self.decoded += len(token_ids)
        return self._text * len(token_ids)


@pytest.mark.parametrize("text", ["", UNFINISHED])
@pytest.mark.parametrize("token_id", [0, 1])
def test_tokens_without_a_character_are_linear(text: str, token_id: int) -> None:
    """However many tokens without text come, each costs a bounded number of decoded tokens."""
    tokenizer = CountingTokenizer(text)
    stream = TextStream(tokenizer)
    for _ in range(2000):
        stream.add(token_id)
    assert tokenizer.decoded <= 200 * 2000
    stream.finish()
    assert stream.text == ("" if token_id == 0 else text * 1999)
