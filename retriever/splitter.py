"""Documents become chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.errors import InputError

from .chunk import Chunk
from .config import RetrieverConfig
from .document import Document
from .plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class Splitter:
    """Cuts documents into chunks of the model's own tokens, as the paper does with LangChain.

    Args:
        tokenizer: the model's fast tokenizer; it is copied.
        config: `chunk_tokens`, `chunk_overlap_tokens` and `separator` are used.

    Raises:
        RetrieverError: the tokenizer is not a fast one.

    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer, config: RetrieverConfig) -> None:
        self.config = config
        self._tokenizer = PlainTokenizer(tokenizer)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's definition: chunks of another tokenizer are other chunks."""
        return self._tokenizer.fingerprint

    def beginning(self, text: str, most_tokens: int) -> str:
        """The first tokens of a text, as text."""
        return next(iter(self._tokenizer.cut(text, most_tokens)), "")

    def split(self, document: Document) -> list[Chunk]:
        """Cut a document into chunks.

        Without overlap, the chunks' texts joined are exactly the document's content (title line and text). A chunk has at most
        `chunk_tokens` tokens, plus those of the separator, plus a few: it is tokenised anew, alone (a word cut in two, a
        number regrouped), and begins with the whole of a character that the border would have torn.

        Raises:
            InputError: the tokenizer makes no tokens of the document.

        """
        texts = self._tokenizer.cut(document.content, self.config.chunk_tokens, self.config.chunk_overlap_tokens)
        if not texts:
            raise InputError(f"document {document.id!r} has no tokens for this model's tokenizer; leave it out")
        return [
            Chunk(
                document_id=document.id,
                version=document.version,
                position=position,
                title=document.title,
                text=text,
                token_ids=tuple(self._tokenizer.ids(text + self.config.separator)),
            )
            for position, text in enumerate(texts)
        ]
