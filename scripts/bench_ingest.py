"""The offline precompute job against the model's own batched forward over the tokens that it reads.

    python scripts/bench_ingest.py                       # 1,000 chunks of the packaged reader's size, about six minutes
    python scripts/bench_ingest.py --chunks 40 --repeats 1
    python scripts/bench_ingest.py --model DIR --dtype bfloat16 --chunks 300

Documents are articles of a fictional world (`eval/world`), cut into chunks. Each chunk's KV is computed after the prompt's head
and the filler passages, which all chunks share, and after its document's earlier text, read in windows. Everything takes turns
in one process; reported are ratios of medians of seconds.

Sides:
`forward`: `model(input_ids, use_cache=True, logits_to_keep=1)` over the same sequences: every window of every document, what is
read again included, in batches by length, at the batch size that was fastest before; and head and filler once.
`kv`: the job where the documents are in the index already (a store that was cleared, another codec).
`ingest`: all that `cacheblend ingest` does once models are loaded: reading the file, splitting, embedding, index, prefill,
encoding, store with its syncs, closing.

Figures: `ingest_over_forward` is `forward` over `ingest`, 1.0 being a job at the speed of the forward alone; `kv_over_forward`
the same of `kv`. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from cacheblend.blend import Fusor
from cacheblend.blend.precompute import DOCUMENT_TOKENS, readings
from cacheblend.eval.world.case import GROUP_SIZE, CaseConfig
from cacheblend.eval.world.corpus import documents
from cacheblend.eval.world.names import Split
from cacheblend.eval.world.world import make_world
from cacheblend.retriever import Document, SentenceTransformerEmbedder
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.chunk_contexts import chunk_context
from cacheblend.service.config import DTYPES, INSTRUCTION
from cacheblend.service.default_model import CHUNK_TOKENS, default_model
from cacheblend.service.document_stream import DocumentStream, Shard
from cacheblend.service.prompt import PromptBuilder

BATCH_SIZES = (1, 4, 8, 16, 32)
GROUPS = 9  # of each kind of article in a world


def articles(seed: str) -> Iterator[dict[str, object]]:
    """Documents without end: world after world, since a world has names for so many articles only."""
    for number in count():
        for article in documents(make_world(f"{seed}-{number}", Split.TEST, GROUPS, GROUP_SIZE), CaseConfig().style):
            yield {"id": f"{number}-{article['id']}", "title": article["title"], "text": article["text"]}


class Bench:
    """One corpus, one model, one embedder, and the calls that are timed."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory, self.model, self.dtype = directory, options.model or default_model(), options.dtype
        self.chunk_tokens = options.chunk_tokens or CHUNK_TOKENS
        self.fusor = Fusor.from_pretrained(self.model, dtype=DTYPES[self.dtype])
        self.embedder = SentenceTransformerEmbedder()
        self.file = directory / "documents.jsonl"
        self.documents: list[list[Sequence[int]]] = []  # token ids of each one's chunks
        with self.engine("split") as engine, self.file.open("w", encoding="utf-8") as file:
            for document in articles(options.seed):
                if self.chunks >= options.chunks:
                    break
                self.documents.append([chunk.token_ids for chunk in engine.retriever.splitter.split(Document.of(document))])
                file.write(json.dumps(document) + "\n")
        context = chunk_context(self.fusor, "auto", DOCUMENT_TOKENS)
        self.shared = [*PromptBuilder(self.fusor.tokenizer, INSTRUCTION).head, *context.filler_ids]
        self.read = [
            reading.token_ids for chunks in self.documents for reading in readings(chunks, range(len(chunks)), context)
        ]

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return sum(map(len, self.documents))

    def engine(self, name: str) -> Engine:
        """An engine over a store of its own, with the models that are loaded."""
        config = EngineConfig(
            model=self.model,
            store_dir=self.directory / name,
            chunk_tokens=self.chunk_tokens,
            device="cpu",
            dtype=self.dtype,
            ram_budget_bytes=1,  # as the command has it
        )
        return Engine(config, fusor=self.fusor, embedder=self.embedder)

    @torch.no_grad()
    def forward(self, batch_size: int) -> None:
        """The model's own forward over what is read; neighbours by length stand in one batch, padded where they differ."""
        model: Any = self.fusor.model
        by_length = sorted(self.read, key=len)
        for batch in [[self.shared], *(by_length[at : at + batch_size] for at in range(0, len(by_length), batch_size))]:
            longest = max(map(len, batch))
            ids_BN = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch])
            mask_BN = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch])
            is_padded = bool((mask_BN == 0).any())
            model(ids_BN, attention_mask=mask_BN if is_padded else None, use_cache=True, logits_to_keep=1)

    def ingest(self, indexed: Path | None = None) -> float:
        """Seconds of the job on a new folder, or on a copy of an index that has the documents."""
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        if indexed is not None:
            shutil.copytree(indexed, self.directory / "store" / indexed.name)
        with self.engine("store") as engine:
            started = time.perf_counter()
            report = engine.ingest_stream(DocumentStream([str(self.file)], Shard()))
            assert report.computed
        return time.perf_counter() - started  # closed, so the index is written too

    def index_alone(self) -> Path:
        """A folder with the index of all documents, and no KV."""
        with self.engine("indexed") as engine:
            engine.retriever.add(DocumentStream([str(self.file)], Shard()))
        return self.directory / "indexed" / "index"


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fastest_batch(bench: Bench) -> int:
    """The batch size at which the forward is fastest, each tried twice."""
    seconds = {size: min(seconds_of(lambda size=size: bench.forward(size)) for _ in "ab") for size in BATCH_SIZES}
    for size, taken in seconds.items():
        print(f"forward in batches of {size}: {taken:.2f} s", file=sys.stderr)
    return min(seconds, key=lambda size: seconds[size])


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time all sides in turn, and compare them."""
    indexed = bench.index_alone()  # loads the embedder as well
    batch_size = fastest_batch(bench)
    sides: dict[str, Callable[[], float]] = {
        "forward": lambda: seconds_of(lambda: bench.forward(batch_size)),
        "kv": lambda: bench.ingest(indexed),
        "ingest": bench.ingest,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name, side in sides.items():
            seconds[name].append(side())
            print(f"round {number + 1} of {repeats}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        "ingest_over_forward": round(median["forward"] / median["ingest"], 3),
        "kv_over_forward": round(median["forward"] / median["kv"], 3),
        "chunks": bench.chunks,
        "documents": len(bench.documents),
        "tokens": sum(len(chunk) for chunks in bench.documents for chunk in chunks),
        "tokens_read": sum(map(len, bench.read)),
        "shared_tokens": len(bench.shared),
        "batch_size": batch_size,
        "model": Path(bench.model).name,
        "dtype": bench.dtype,
        "seconds": {name: [round(one, 3) for one in sorted(taken)] for name, taken in seconds.items()},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id; the packaged reader by default")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--chunks", type=int, default=1000, help="at least so many, to the end of a document")
    parser.add_argument("--chunk-tokens", type=int, help=f"size of a chunk; {CHUNK_TOKENS} by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", default="71", help="of the world")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where stores are made and removed; its disk is measured too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        print(json.dumps(measure(Bench(Path(folder), options), options.repeats)))


if __name__ == "__main__":
    main()
