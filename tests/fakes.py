"""Small stand-ins for what is slow or large: an embedder, a tokenizer and a tier of a store."""

import functools
import re
import zlib
from collections.abc import Sequence
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


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
