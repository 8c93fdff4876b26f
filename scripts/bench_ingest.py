"""The offline precompute job against the model's own batched forward over the very sequences that the job reads.

    python scripts/bench_ingest.py                       # SmolLM2, 200 chunks of 512 tokens
    python scripts/bench_ingest.py --chunks 40 --repeats 1
    python scripts/bench_ingest.py --model ./model --chunk-tokens 128

Documents are chapters of the packaged handbook, edition after edition, so that no two are equal; each ends with a chunk that is
shorter than the others. The sides run by turns in one process; reported are ratios of medians of seconds.

Sides:
`forward`: `model(input_ids, use_cache=True, logits_to_keep=1)` of the prompt's head and the filler passages, once, and after
its cache of every window of every document (`ChunkContext.windows`). Sequences are sorted by length and padded at the end,
which a causal model does not see, in batches of the size that was fastest before. A short head without filler runs
with each window.
`kv`: the job where the documents are in the index already (a store that was cleared, another codec): prefill, encoding, store
with its syncs, closing.
`ingest`: all that `cacheblend ingest` does once models are loaded: reading the file, splitting, embedding, index as well.

Figures: `kv_over_forward` is seconds of `forward` over those of `kv`, 1.0 being a job at the speed of the forward alone;
`ingest_over_forward` likewise. The last stdout line is one JSON object.
"""

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from cacheblend.blend import Fusor
from cacheblend.blend.fusor import SHARED_PREFIX_TOKENS
from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.eval.handbook import handbook_documents
from cacheblend.retriever import Document, RetrieverConfig, SentenceTransformerEmbedder
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.chunk_context import chunk_context
from cacheblend.service.engine.config import DTYPES
from cacheblend.service.engine.document_sources import DocumentStream
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.store import StoreConfig

BATCH_SIZES = (1, 4, 8, 16, 32, 64)


def editions() -> Iterator[dict[str, str]]:
    """Yield the handbook's chapters without end; each edition marks every paragraph, so that no chunk comes twice."""
    for edition in count():
        for chapter in handbook_documents():
            text = chapter["text"].replace("\n\n", f"\n\nEdition {edition}. ")
            yield {"id": f"{edition}-{chapter['id']}", "title": chapter["title"], "text": text}


class Bench:
    """One corpus, one model, one embedder, and the calls that are timed.

    Args:
        directory: an empty folder; stores are made and removed there.
        chunks: the corpus has at least so many, to the end of a document.
        model: as for `EngineConfig`.
        dtype: as for `EngineConfig`.
        chunk_tokens: as for `RetrieverConfig`.
    """

    def __init__(self, directory: Path, chunks: int, model: str, dtype: str, chunk_tokens: int) -> None:
        self.config = EngineConfig(
            model=model,
            store_dir=directory / "store",
            device="cpu",
            dtype=dtype,
            retriever=RetrieverConfig(chunk_tokens=chunk_tokens),
            store=StoreConfig(ram_budget_bytes=1),
        )
        self.directory, self.file = directory, directory / "documents.jsonl"
        self.fusor = Fusor.from_pretrained(model, dtype=dtype)
        self.embedder = SentenceTransformerEmbedder()
        self.documents: list[list[tuple[int, ...]]] = []  # token ids of chunks
        with self.engine("split") as engine, self.file.open("w", encoding="utf-8") as file:
            for document in editions():
                if sum(map(len, self.documents)) >= chunks:
                    break
                split = engine.retriever.splitter.split(Document.of(document))
                self.documents.append([tuple(chunk.token_ids) for chunk in split])
                file.write(json.dumps(document) + "\n")
        head = PromptRenderer(self.fusor.tokenizer, self.config.instruction).prefix
        context = chunk_context(self.fusor, self.config.context_filler, self.config.context_document_tokens, len(head))
        before, self.shared = (*head, *context.filler_ids), ()
        if len(before) >= SHARED_PREFIX_TOKENS:
            before, self.shared = (), before
        self.read = [
            [*before, *chain.from_iterable(own[window.first : window.last])]
            for own in self.documents
            for window in context.windows(own)
        ]
        self.read.sort(key=len)

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(map(len, chain.from_iterable(self.documents)))

    def engine(self, name: str) -> Engine:
        """An engine over a store of its own, with the models that are loaded, and nothing of an earlier job's."""
        fusor = Fusor(self.fusor.model, self.fusor.tokenizer, fingerprint=self.fusor.fingerprint)
        return Engine(replace(self.config, store_dir=self.directory / name), fusor=fusor, embedder=self.embedder)

    @torch.no_grad()
    def forward(self, batch_size: int) -> None:
        """The model's own forward over all that the job reads."""
        model: Any = self.fusor.model
        shared = model(torch.tensor([self.shared]), use_cache=True, logits_to_keep=1).past_key_values if self.shared else None
        for first in range(0, len(self.read), batch_size):
            batch = self.read[first : first + batch_size]
            longest = len(batch[-1])
            padded = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in batch])
            cache = copy.deepcopy(shared)
            if cache is not None:
                cache.batch_repeat_interleave(len(batch))
            model(padded, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def ingest(self, *, indexed: Path | None = None) -> float:
        """Seconds of the job on a new folder, or on a copy of an index that has the documents."""
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        if indexed is not None:
            shutil.copytree(indexed, self.directory / "store" / indexed.name)
        with self.engine("store") as engine:
            started = time.perf_counter()
            report = engine.ingest_stream(DocumentStream([str(self.file)]))
            assert report.tokens == self.tokens
        return time.perf_counter() - started  # closed, so the index is written too

    def index_alone(self) -> Path:
        """A folder with the index of all documents, and no KV."""
        with self.engine("indexed") as engine:
            engine.retriever.add(DocumentStream([str(self.file)]))
        return self.directory / "indexed" / "index"


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fastest_batch(bench: Bench) -> int:
    """The batch size at which the forward is fastest, each tried twice."""
    sizes = [size for size in BATCH_SIZES if size < 2 * len(bench.read)]  # the last one has all sequences in one batch
    seconds = {size: min(seconds_of(lambda size=size: bench.forward(size)) for _ in "ab") for size in sizes}
    for size, taken in seconds.items():
        print(f"forward in batches of {size}: {taken:.2f} s", file=sys.stderr)
    return min(seconds, key=lambda size: seconds[size])


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time all sides in turn, and compare them."""
    indexed = bench.index_alone()  # loads the embedder as well
    batch_size = fastest_batch(bench)
    sides: dict[str, Callable[[], float]] = {
        "forward": lambda: seconds_of(lambda: bench.forward(batch_size)),
        "kv": lambda: bench.ingest(indexed=indexed),
        "ingest": bench.ingest,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name, side in sides.items():
            seconds[name].append(side())
            print(f"round {number + 1} of {repeats}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        **{f"{job}_over_forward": round(median["forward"] / median[job], 3) for job in ("kv", "ingest")},
        "model": Path(bench.config.model).name,
        "dtype": str(bench.fusor.decoder.dtype),
        "chunks": sum(map(len, bench.documents)),
        "documents": len(bench.documents),
        "tokens": bench.tokens,
        "read_tokens": sum(map(len, bench.read)),
        "shared_tokens": len(bench.shared),
        "batch_size": batch_size,
        "seconds": {name: [round(one, 3) for one in sorted(taken)] for name, taken in seconds.items()},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, GGUF file or known name (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=list(DTYPES), help="that the model computes in")
    parser.add_argument("--chunks", type=int, default=200, help="at least so many, to the end of a document")
    parser.add_argument("--chunk-tokens", type=int, default=RetrieverConfig().chunk_tokens)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where stores are made and removed; its disk is measured too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        bench = Bench(Path(folder), options.chunks, options.model, options.dtype, options.chunk_tokens)
        print(json.dumps(measure(bench, options.repeats)))


if __name__ == "__main__":
    main()
