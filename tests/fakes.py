"""Small stand-ins for what is slow or large: an embedder, a tokenizer and a tier of a store."""

from __future__ import annotations

import functools
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cacheblend.store.entry import EncodedEntry
from cacheblend.store.tiers import Pins


class FakeEmbedder:
    """Bags of hashed words on the unit sphere: texts that share words are near."""

    def __init__(self, name: str = "fake", dimensions: int = 64) -> None:
        self.name = name
        self.dimensions = dimensions

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of the texts, float32 (N, D), of unit length."""
        vectors_ND = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()) or [""]:
                vectors_ND[row, zlib.crc32(word.encode()) % self.dimensions] += 1
        return vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)


class BlindEmbedder(FakeEmbedder):
    """Finds every text equally near, so that words alone decide, and notes the texts."""

    texts: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts = (*self.texts, *texts)
        return np.full((len(texts), self.dimensions), self.dimensions**-0.5, dtype=np.float32)


class FakeRemoteTier:
    """A `CacheTier` that keeps copies in a dict and says that they are far away: reading one waits for a device."""

    name: ClassVar[str] = "remote"
    in_memory: ClassVar[bool] = False

    def __init__(self, budget_bytes: int, pins: Pins) -> None:
        self.budget_bytes, self._pins = budget_bytes, pins
        self.evictions = 0
        self.closed = False
        self._entries: OrderedDict[str, EncodedEntry] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def size(self) -> tuple[int, int]:
        return len(self._entries), sum(entry.nbytes for entry in self._entries.values())

    def open(self, digest: str) -> EncodedEntry | None:
        if digest in self._entries:
            self._entries.move_to_end(digest)
        return self._entries.get(digest)

    def put(self, entry: EncodedEntry) -> bool:
        if entry.nbytes > self.budget_bytes:
            return False
        self._entries[entry.info.key.digest] = entry
        for digest in list(self._entries):
            if self.size()[1] > self.budget_bytes and not self._pins.is_pinned(digest):
                del self._entries[digest]
                self.evictions += 1
        return entry.info.key.digest in self._entries

    def admits(self, digest: str, entry_bytes: int) -> bool:
        return True

    def discard(self, digest: str) -> None:
        self._entries.pop(digest, None)

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        self.discard(digest)

    def close(self) -> None:
        self.closed = True


@functools.cache
def tiny_tokenizer(vocab: int = 600) -> PreTrainedTokenizerFast:
    """A byte-level BPE over a little English, with `<s>` (id 0), which it puts in front, and `</s>` (id 1); made once."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["for"], topics["while"], topics["class"]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
