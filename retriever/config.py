"""The retriever's configuration: how it splits, embeds and stores."""

from dataclasses import dataclass
from pathlib import Path

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_whole, is_number, option

DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
SEPARATOR = "\n\n"  # text after every chunk, tokenised together with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverConfig:
    """Settings of a `Retriever`; those that shape the chunks are fixed for the life of a directory.

    Raises:
        ConfigError: a value is not allowed.
    """

    directory: Path | None = None  # of the catalog, made when missing; None keeps it in memory
    chunk_tokens: int = option(512, "Tokens of the model in a chunk, before its separator; fixed once documents are ingested.")
    embedder: str = option(DEFAULT_EMBEDDER, "A sentence-transformers model: a name or a folder.")
    index_budget_bytes: int | None = option(None, "Bytes of the index (texts, token ids, vectors); more are refused.")
    min_score: float | None = option(None, "Leave out chunks whose cosine similarity with the question, -1 to 1, is below it.")
    search_rounds: int = 2  # the second takes a third of the chunks by names in the best document, for questions over two

    def __post_init__(self) -> None:
        if isinstance(self.directory, str):  # what command lines and notebooks pass
            object.__setattr__(self, "directory", Path(self.directory))
        if self.directory is not None and not isinstance(self.directory, Path):
            raise ConfigError("directory", self.directory, "a path, or None for memory")
        check_whole("chunk_tokens", self.chunk_tokens)
        if not isinstance(self.embedder, str) or not self.embedder.strip():
            raise ConfigError("embedder", self.embedder, "name or path of a model of sentence-transformers")
        if self.index_budget_bytes is not None:
            check_whole("index_budget_bytes", self.index_budget_bytes)
        if self.min_score is not None and not (is_number(self.min_score) and -1 <= self.min_score <= 1):
            raise ConfigError("min_score", self.min_score, "a number from -1 to 1, or None")
