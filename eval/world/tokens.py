"""The reader's tokenizer: one token for every word of the world, single bytes for anything else.

A word's token carries the space before it, and the normaliser gives the first word of every line that space too, so a name is
the same token wherever it stands. Text that ends in a newline can therefore be tokenised apart and put together: its ids are
those of the whole. Any text encodes and decodes to itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.prompt import AFTER_QUESTION, BEFORE_QUESTION

from . import article
from .catalogue import CLUB, FILM, FIRM, PERSON, TOWN, WORK
from .names import PATTERNS, Relation

BOS = "<s>"
EOS = "</s>"
PAD = "<pad>"

_SPACE = "Ġ"  # what ByteLevel writes for a space
_PIECES = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]|\s")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the world's closed vocabulary; the same on every machine."""
    marks = [BOS, EOS, PAD]
    pieces = marks + sorted(pre_tokenizers.ByteLevel.alphabet()) + [_SPACE + word for word in vocabulary()]
    ids = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    # A space before the first word of every line, in three steps: the library panics on a replacement of zero width.
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("\n"),
            normalizers.Replace(Regex(r"\n(?=[^\n])"), "\n "),
            normalizers.Replace(Regex(r"\A\n"), ""),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(r"^ "), "")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def vocabulary() -> tuple[str, ...]:
    """Every word of the world, in order; the first word of a sentence in both cases."""
    found = {word for name in _names() for word in name.split()}
    for text in _phrases():
        plain = re.findall(r"[A-Za-z]+", re.sub(r"\{\w\}", " ", text))
        found.update(plain)
        if plain and not text.startswith("{"):
            found.update((plain[0].lower(), plain[0].capitalize()))
    return tuple(sorted(found))


def _relations() -> Iterable[Relation]:
    return (*PERSON, *FIRM, *TOWN, *CLUB, *FILM, *WORK)


def _names() -> Iterable[str]:
    for pattern in PATTERNS.values():
        yield from (*pattern.fronts, *pattern.backs)
    for relation in _relations():
        yield from relation.values


def _phrases() -> Iterable[str]:
    yield from (*INSTRUCTION.splitlines(), BEFORE_QUESTION, AFTER_QUESTION)
    yield from (*article.OPENERS, *article.TAILS, *article.QUESTION_OPENERS, *article.INTRODUCTIONS)
    yield from article.FILLERS
    for roles in article.ROLES.values():
        yield from roles
    for stand_ins in article.STAND_INS.values():
        yield from (text for pair in stand_ins for text in pair)
    yield from ("she", "he", "her", "his")
    yield from (pattern.joint for pattern in PATTERNS.values())
    for relation in _relations():
        yield from (*relation.statements, *relation.questions, *relation.reverse)
        yield from (*relation.descriptions, *relation.most, *relation.least)
