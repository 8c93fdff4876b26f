"""Measures an index that replicas share in PostgreSQL against one in a folder: search, start, and what others changed.

    python scripts/measure_index.py                    # 1,000 documents of 20 chunks, 384 dimensions
    python scripts/measure_index.py --documents 10000

Texts are of the Python reference, vectors random: nothing is embedded, so that all of it is the index's own time. The server is
one of the script's own, on a Unix socket; a network adds its round trips, which `statements` counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes import tiny_tokenizer
from postgres import PostgresServer

from cacheblend.retriever import Document, EmbeddedDocument, Retriever, RetrieverConfig
from cacheblend.retriever.document import Chunk
from cacheblend.retriever.postgres_catalog import PostgresCatalog

WORDS = " ".join(topics.values()).split()
CHUNK_WORDS = 200
SEARCHES = 100


class RandomEmbedder:
    """Gives every text a random vector of length 1."""

    name = "random"

    def __init__(self, dimensions: int) -> None:
        self.dimensions, self._random = dimensions, np.random.default_rng(0)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One for each."""
        vectors_ND = self._random.standard_normal((len(texts), self.dimensions)).astype(np.float32)
        return vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)


def document(number: int, chunks: int, embedder: RandomEmbedder) -> EmbeddedDocument:
    """A document of random words, cut into chunks."""
    choose = random.Random(number)
    texts = [" ".join(choose.choices(WORDS, k=CHUNK_WORDS)) for _ in range(chunks)]
    made = Document(f"{number}", f"Document {number}", " ".join(texts))
    ids = tuple(range(CHUNK_WORDS))
    cut = [Chunk(made.id, made.version, at, made.title, text, ids) for at, text in enumerate(texts)]
    return EmbeddedDocument(made, cut, embedder.encode(texts))


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Fill both, and measure by turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--dimensions", type=int, default=384)
    options = parser.parse_args()
    embedder = RandomEmbedder(options.dimensions)
    with PostgresServer() as server, tempfile.TemporaryDirectory() as folder:
        url = server.new_database()

        def open_one(index: str | None, directory: str | None) -> Retriever:
            config = RetrieverConfig(directory=None if directory is None else Path(folder, directory), index=index)
            return Retriever(config, tiny_tokenizer(), embedder)

        figures: dict[str, dict[str, float]] = {"folder": {}, "postgres": {}}
        with open_one(None, "folder") as own, open_one(url, None) as shared:
            retrievers = {"folder": own, "postgres": shared}
            documents = [document(number, options.chunks, embedder) for number in range(options.documents)]
            for name, retriever in retrievers.items():
                took_s = seconds(lambda retriever=retriever: [retriever.put([one]) for one in documents])  # type: ignore[misc]
                figures[name]["write_chunks_per_s"] = options.documents * options.chunks / took_s
            questions = [" ".join(random.Random(at).choices(WORDS, k=8)) for at in range(SEARCHES)]
            for retriever in retrievers.values():
                retriever.search(questions[0], 6)
            took: dict[str, list[float]] = {name: [] for name in retrievers}
            for question in questions:
                for name, retriever in retrievers.items():
                    took[name].append(1e3 * seconds(lambda r=retriever, q=question: r.search(q, 6)))  # type: ignore[misc]
            for name in retrievers:
                figures[name]["search_ms"] = statistics.median(took[name])
            execute, count = PostgresCatalog._execute, 0

            def counted(catalog: PostgresCatalog, *arguments: object) -> object:
                nonlocal count
                count += 1
                return execute(catalog, *arguments)  # type: ignore[arg-type]

            PostgresCatalog._execute = counted  # type: ignore[assignment,method-assign]
            shared.search(questions[0], 6)
            PostgresCatalog._execute = execute  # type: ignore[method-assign]
            figures["postgres"]["statements"] = count
            with open_one(url, "replica") as replica:
                figures["postgres"]["first_start_s"] = seconds(lambda: replica.search(questions[0], 6))
                added = [document(options.documents + number, options.chunks, embedder) for number in range(10)]
                shared.put(added)
                figures["postgres"]["search_after_10_documents_ms"] = 1e3 * seconds(lambda: replica.search(questions[1], 6))
                shared.delete(added[0].document.id)
                figures["postgres"]["search_after_a_deletion_ms"] = 1e3 * seconds(lambda: replica.search(questions[2], 6))
    print(json.dumps({"documents": options.documents, "chunks": options.documents * options.chunks, **figures}))


if __name__ == "__main__":
    main()
