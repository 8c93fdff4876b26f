"""Chunks: nothing lost, nothing torn, sizes as promised."""

import random
import re

import pytest
from fakes import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from cacheblend.base.errors import InputError, RetrieverError
from cacheblend.retriever import Chunk, Document, PlainTokenizer, RetrieverConfig, Splitter, splitter

# What a chunk may have above chunk_tokens and the separator's tokens: up to three bytes of a character that the border would
# have torn, and the re-tokenisation of its first and last word.
SLACK_TOKENS = 6

_pieces = st.sampled_from(
    ["word ", "for i in", "😀", "👩‍👩‍👧", "漢字", "e\u0301", "\r\n", "\n\n", "  ", "12345", "ß", "\x00", "</s>", "."]
)
_texts = st.lists(_pieces | st.text(max_size=8), min_size=1, max_size=40).map("".join).filter(lambda text: text.strip())


def split(text: str, title: str = "", **config: object) -> list[Chunk]:
    return Splitter(tiny_tokenizer(), RetrieverConfig(**config)).split(Document("d", title, text))  # type: ignore[arg-type]


@given(text=_texts, title=st.sampled_from(["", "A title", "題"]), chunk_tokens=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_chunks_joined_are_the_content(text: str, title: str, chunk_tokens: int) -> None:
    """Without overlap the chunks' texts are the title's line and the text, cut; sizes and positions are as promised.

    A text that fits in one chunk is tokenised once, and is cut as a longer text is.
    """
    chunks = split(text, title, chunk_tokens=chunk_tokens)
    content = f"{title}\n{text}" if title else text
    assert "".join(chunk.text for chunk in chunks) == content
    cut = PlainTokenizer(tiny_tokenizer()).cut(content, chunk_tokens, at_sentences=True)
    assert [chunk.text for chunk in chunks] == cut
    assert [chunk.position for chunk in chunks] == list(range(len(chunks)))
    separator_tokens = len(tiny_tokenizer()("\n\n", add_special_tokens=False)["input_ids"])
    assert max(len(chunk.token_ids) for chunk in chunks) <= chunk_tokens + separator_tokens + SLACK_TOKENS


def test_chunks_end_where_the_text_does() -> None:
    """A chunk ends before a heading, after a paragraph or a sentence, in its last half; words are torn nowhere."""
    sentence = "The value of the item is the name of the class. "
    text = f"# First\n\n{sentence * 3}\n\n{sentence * 4}\n## Second\n\n{sentence * 9}"
    size = len(split(sentence, chunk_tokens=500)[0].token_ids)
    chunks = [chunk.text for chunk in split(text, chunk_tokens=4 * size)]
    assert "".join(chunks) == text
    assert len(chunks) > 3
    assert any(chunk.startswith("## Second") for chunk in chunks)
    assert all(chunk.rstrip().endswith("class.") for chunk in chunks)


def test_no_tail_is_left() -> None:
    """The last chunk has a quarter of the tokens at least: a few words with nothing beside them would win many searches."""
    for words in range(60, 130):
        chunks = split("word " * words, chunk_tokens=40)
        assert min(len(chunk.token_ids) for chunk in chunks) >= 10, words


def test_a_text_without_breaks_is_cut_all_the_same() -> None:
    """Where no break is near, chunks have just so many tokens."""
    for text in ("漢字" * 300, "x" * 2000, "\n" * 500 + "end"):
        assert "".join(chunk.text for chunk in split(text, chunk_tokens=16)) == text


def test_a_run_of_marks_is_read_once() -> None:
    """A text of 131,072 marks without a blank is split at once: a search that tries every mark of the run would take hours."""
    text = "!" * splitter.CUT_CHARACTERS
    assert "".join(chunk.text for chunk in split(text, chunk_tokens=64)) == text
    assert [list(each.finditer(text)) for each in splitter.BREAKS] == [[]] * len(splitter.BREAKS)


def test_sentences_end_where_marks_and_quotes_do() -> None:
    """Sentences end where the plain pattern, which reads a run of marks as often as it is long, says."""
    plain = re.compile(r"[.!?\u2026\u06d4]+[\"'\u2019\u201d)\]]*(?=\s)|[\u3002\uff01\uff1f]")
    drawn = random.Random(0)
    for _ in range(2000):
        text = "".join(drawn.choices(".!?\u2026\u06d4\"')]\u3002 \na", k=drawn.randint(1, 60)))
        assert [found.end() for found in splitter.BREAKS[3].finditer(text)] == [found.end() for found in plain.finditer(text)]


def test_token_ids_are_those_of_the_chunk_alone_with_its_separator() -> None:
    """A chunk's ids are what the model's tokenizer makes of its text and separator, without special tokens.

    The title is the first line of chunk 0, and known to every chunk.
    """
    tokenizer = tiny_tokenizer()
    chunks = split("the value of the item " * 30, "Title", chunk_tokens=16)
    for chunk in chunks:
        assert list(chunk.token_ids) == tokenizer(chunk.text + "\n\n", add_special_tokens=False)["input_ids"]
        assert (chunk.title, chunk.text.startswith("Title\n")) == ("Title", chunk.position == 0)
    assert len(chunks) > 2


def test_special_tokens_in_a_document_are_plain_text() -> None:
    """A document that spells the end-of-text token does not end a prompt."""
    tokenizer = tiny_tokenizer()
    [chunk] = split("before</s>after")
    assert tokenizer.eos_token_id not in chunk.token_ids
    assert tokenizer.decode(list(chunk.token_ids)) == "before</s>after\n\n"


def test_tokenizer_that_changes_text_loses_nothing() -> None:
    """Chunks are slices of the document even where the tokenizer lower-cases, strips accents and drops white space."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(["some words here"] * 9, trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"]))
    text = "  Some  WÖRDS\r\nhere 漢字 "
    chunks = Splitter(tokenizer, RetrieverConfig(chunk_tokens=2)).split(Document("d", "", text))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == text
    with pytest.raises(InputError, match="'d' has no tokens"):
        Splitter(tokenizer, RetrieverConfig()).split(Document("d", "", "\x01"))


def test_owners_tokenizer_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Splitting a long text neither warns, nor is truncated, nor changes the tokenizer it was given."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    tokenizer.enable_truncation(8)
    chunks = Splitter(tokenizer, RetrieverConfig(chunk_tokens=64)).split(Document("d", "", "many words " * 2000))
    assert sum(len(chunk.text) for chunk in chunks) == 22000
    assert tokenizer.truncation["max_length"] == 8
    assert capfd.readouterr() == ("", "")


def test_slow_tokenizer_is_refused() -> None:
    """A tokenizer without character offsets is refused with the remedy."""
    with pytest.raises(RetrieverError, match="fast tokenizer"):
        Splitter(object(), RetrieverConfig())  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("max_tokens", [7, 300])
def test_a_long_text_is_tokenised_in_slices(max_tokens: int) -> None:
    """A text that is tokenised in slices loses nothing, and has about the pieces that it has in one go."""
    plain, sliced = (PlainTokenizer(tiny_tokenizer(), slice_characters=size) for size in (10**6, 500))
    text = " ".join(f"word{number} und Straße, {number}" for number in range(1000))
    whole, pieces = plain.cut(text, max_tokens), sliced.cut(text, max_tokens)
    assert "".join(pieces) == text
    assert pieces[0] == whole[0]
    assert len(pieces) == pytest.approx(len(whole), rel=0.02)
    assert max(len(plain.ids(piece)) for piece in pieces) <= max_tokens + 4


def test_a_check_ends_the_splitting() -> None:
    """A long text is checked between its slices and its chunks, so that its work can be ended."""
    splitter, calls = Splitter(tiny_tokenizer(), RetrieverConfig(chunk_tokens=64)), list[int]()
    document = Document("long", "", "some words of a long text. " * 30_000)

    def check() -> None:
        calls.append(len(calls))
        if len(calls) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        splitter.split(document, check)
    assert len(calls) == 6
