"""The offline precompute job against the model's own batched forward on the same tokens.

    python scripts/bench_ingest.py                       # 1,000 chunks of the packaged reader's size, about six minutes
    python scripts/bench_ingest.py --chunks 40 --repeats 1

Documents are articles of a fictional world (`eval/world`) that the reader never saw, cut into chunks of 96 tokens, so that
every document ends with a shorter one. Everything takes turns in one process; reported are ratios of medians of seconds.

Sides:
`forward`: `model(input_ids, use_cache=True, logits_to_keep=1)` of every chunk behind BOS, in batches of equal length, at the
batch size that was fastest before.
`forwarded`: the same of what is read with the document context: every document of several chunks as a whole, and its chunks but
the first, whose KV the whole has.
`embedding`: the embedder on every chunk's text, in one call.
`ingest`: all that `cacheblend ingest --no-document-context` does once models are loaded: reading the file, splitting,
embedding, index, prefill, encoding, store with its syncs, closing. `ingest_with_context` is the default, `cacheblend ingest`.
`kv`, `kv_with_context`: the same job where the documents are in the index already (a store that was cleared, another codec).

Figures: `ingest_over_forward` is `forward` over `ingest`, 1.0 being a job at the speed of the forward alone, and so on:
`X_over_forward` for each job, `X_with_context_over_forwarded` against the tokens that it really forwards.
`ingest_over_forward_and_embedding` compares with the two models' forwards together, which no job that embeds can do without.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from cacheblend.blend import Fusor
from cacheblend.eval.world.case import GROUP_SIZE, CaseConfig
from cacheblend.eval.world.corpus import documents
from cacheblend.eval.world.names import Split
from cacheblend.eval.world.world import make_world
from cacheblend.retriever import Chunk, Document, SentenceTransformerEmbedder, embedded_text
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.default_model import CHUNK_TOKENS, default_model
from cacheblend.service.document_stream import DocumentStream, Shard

BATCH_SIZES = (8, 16, 32, 64)
GROUPS = 9  # of each kind of article in a world


def articles(seed: str) -> Iterator[dict[str, object]]:
    """Documents without end: world after world, since a world has names for so many articles only."""
    for number in count():
        for article in documents(make_world(f"{seed}-{number}", Split.TEST, GROUPS, GROUP_SIZE), CaseConfig().style):
            yield {"id": f"{number}-{article['id']}", "title": article["title"], "text": article["text"]}


class Bench:
    """One corpus, one model, one embedder, and the calls that are timed."""

    def __init__(self, directory: Path, chunks: int, seed: str) -> None:
        self.directory = directory
        self.fusor = Fusor.from_pretrained(default_model())
        self.embedder = SentenceTransformerEmbedder()
        self.file = directory / "documents.jsonl"
        self.chunks: list[list[Chunk]] = []  # by document
        with self.engine("split") as engine, self.file.open("w", encoding="utf-8") as file:
            for document in articles(seed):
                if sum(map(len, self.chunks)) >= chunks:
                    break
                self.chunks.append(engine.retriever.splitter.split(Document.of(document)))
                file.write(json.dumps(document) + "\n")
        bos = [int(self.fusor.tokenizer.bos_token_id)]
        self.alone = [[*bos, *chunk.token_ids] for document in self.chunks for chunk in document]
        several = [document for document in self.chunks if len(document) > 1]
        self.read = [[*bos, *document[0].token_ids] for document in self.chunks if len(document) == 1]
        self.read += [[*bos, *chunk.token_ids] for document in several for chunk in document[1:]]
        self.wholes = [[*bos, *(token for chunk in document for token in chunk.token_ids)] for document in several]
        self.texts: list[str] = []  # what the index embeds

    @property
    def tokens(self) -> int:
        """Tokens of all chunks, BOS not counted."""
        return sum(len(chunk.token_ids) for document in self.chunks for chunk in document)

    def engine(self, name: str, *, document_context: bool = False) -> Engine:
        """An engine over a store of its own, with the models that are loaded."""
        config = EngineConfig(
            model=default_model(),
            store_dir=self.directory / name,
            chunk_tokens=CHUNK_TOKENS,
            device="cpu",
            document_context=document_context,
            ram_budget_bytes=1,  # as the command has it
        )
        return Engine(config, fusor=self.fusor, embedder=self.embedder)

    @torch.no_grad()
    def forward(self, sequences: Sequence[Sequence[int]], batch_size: int) -> None:
        """The model's own forward over sequences, in batches of equal length."""
        by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
        for sequence in sequences:
            by_length[len(sequence)].append(sequence)
        model: Any = self.fusor.model
        for same in by_length.values():
            for first in range(0, len(same), batch_size):
                model(torch.tensor(same[first : first + batch_size]), use_cache=True, logits_to_keep=1)

    def ingest(self, *, document_context: bool, indexed: Path | None = None) -> float:
        """Seconds of the job on a new folder, or on a copy of an index that has the documents."""
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        if indexed is not None:
            shutil.copytree(indexed, self.directory / "store" / indexed.name)
        with self.engine("store", document_context=document_context) as engine:
            started = time.perf_counter()
            report = engine.ingest_stream(DocumentStream([str(self.file)], Shard()))
            assert report.computed
        return time.perf_counter() - started  # closed, so the index is written too

    def index_alone(self) -> Path:
        """A folder with the index of all documents, and no KV."""
        with self.engine("indexed") as engine:
            engine.retriever.add(DocumentStream([str(self.file)], Shard()))
            self.texts = [embedded_text(chunk) for chunk in engine.retriever.chunks()]
        return self.directory / "indexed" / "index"


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fastest_batch(bench: Bench, sequences: Sequence[Sequence[int]]) -> int:
    """The batch size at which the forward over the sequences is fastest, each tried twice."""
    seconds = {size: min(seconds_of(lambda size=size: bench.forward(sequences, size)) for _ in "ab") for size in BATCH_SIZES}
    for size, taken in seconds.items():
        print(f"forward in batches of {size}: {taken:.2f} s", file=sys.stderr)
    return min(seconds, key=lambda size: seconds[size])


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time all sides in turn, and compare them."""
    indexed = bench.index_alone()  # loads the embedder as well
    sizes = {"alone": fastest_batch(bench, bench.alone), "wholes": fastest_batch(bench, bench.wholes)}

    def forwarded() -> None:
        bench.forward(bench.read, sizes["alone"])
        bench.forward(bench.wholes, sizes["wholes"])

    sides: dict[str, Callable[[], float]] = {
        "forward": lambda: seconds_of(lambda: bench.forward(bench.alone, sizes["alone"])),
        "forwarded": lambda: seconds_of(forwarded),
        "embedding": lambda: seconds_of(lambda: bench.embedder.encode(bench.texts)),
        "kv": lambda: bench.ingest(document_context=False, indexed=indexed),
        "kv_with_context": lambda: bench.ingest(document_context=True, indexed=indexed),
        "ingest": lambda: bench.ingest(document_context=False),
        "ingest_with_context": lambda: bench.ingest(document_context=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name, side in sides.items():
            seconds[name].append(side())
            print(f"round {number + 1} of {repeats}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    over = {
        **{f"{job}_over_forward": median["forward"] / median[job] for job in sides if job.startswith(("kv", "ingest"))},
        "kv_with_context_over_forwarded": median["forwarded"] / median["kv_with_context"],
        "ingest_with_context_over_forwarded": median["forwarded"] / median["ingest_with_context"],
        "ingest_over_forward_and_embedding": (median["forward"] + median["embedding"]) / median["ingest"],
    }
    return {
        **{name: round(ratio, 3) for name, ratio in over.items()},
        "chunks": len(bench.alone),
        "documents": len(bench.chunks),
        "tokens": bench.tokens,
        "tokens_with_context": sum(map(len, [*bench.read, *bench.wholes])),
        "batch_sizes": sizes,
        "seconds": {name: [round(one, 3) for one in sorted(taken)] for name, taken in seconds.items()},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1000, help="at least so many, to the end of a document")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", default="71", help="of the world")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where stores are made and removed; its disk is measured too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        print(json.dumps(measure(Bench(Path(folder), options.chunks, options.seed), options.repeats)))


if __name__ == "__main__":
    main()
