"""Recall of the ways to search: dense, hybrid, and hybrid with a second round, over the passages of a data set.

    python scripts/measure_retrieval.py 2wikimqa_sharedcorpus1000.jsonl.gz --cases 300

All passages of all cases are one corpus, a document each. Gold passages of a question are those of its own case that hold an
answer or whose title the question names. `recall`: their share among the `--top-k` chunks found; `answer`: whether one that
holds an answer is; `all`: whether all gold ones are; in the mean. The last line on stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from cacheblend.eval.data.file_source import read_examples
from cacheblend.eval.data.request import Example
from cacheblend.retriever import Document, Retriever, RetrieverConfig, SentenceTransformerEmbedder
from cacheblend.service.cli.model import READER

WAYS = {
    "dense": {"retrieval": "dense"},
    "hybrid": {"search_rounds": 1},
    "hybrid, 2 rounds": {"search_rounds": 2},
}
NO_ANSWER = {"", "yes", "no"}  # stand in no passage


def plain(text: str) -> str:
    """Lower-case words between single spaces, with one at either end."""
    return f" {re.sub(r'[^0-9a-z]+', ' ', text.lower()).strip()} "


def gold(example: Example) -> tuple[set[str], set[str]]:
    """Ids of the gold passages, and of those among them that hold an answer."""
    question = plain(example.question)
    answers = [plain(answer) for answer in example.answers if plain(answer).strip() not in NO_ANSWER]
    holding = {id_of(one) for one in example.passages if any(answer in plain(one.text) for answer in answers)}
    names = {id_of(one): plain(re.sub(r"\(.*?\)", "", one.title)) for one in example.passages}
    return holding | {id_ for id_, name in names.items() if name.strip() and name in question}, holding


def id_of(passage: object) -> str:
    """A passage's document."""
    return Document.of({"title": passage.title, "text": passage.text}).id  # type: ignore[attr-defined]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--top-k", type=int, default=6)
    options = parser.parse_args()
    examples = list(read_examples(options.file))
    corpus = {id_of(one): {"title": one.title, "text": one.text} for example in examples for one in example.passages}
    wanted = [(example.question, *gold(example)) for example in examples[: options.cases]]
    wanted = [case for case in wanted if case[1]]
    tokenizer, embedder = AutoTokenizer.from_pretrained(READER), SentenceTransformerEmbedder()
    print(f"{len(corpus)} passages, {len(wanted)} questions", file=sys.stderr)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, settings in WAYS.items():
            config = RetrieverConfig(directory=Path(folder), chunk_tokens=8192, **settings)  # type: ignore[arg-type]
            with Retriever(config, tokenizer, embedder) as retriever:
                retriever.add(corpus.values())  # embedded once: the next ones find it there
                found = [
                    {hit.chunk.document_id for hit in retriever.search(question, options.top_k)} for question, *_ in wanted
                ]
            pairs = [(ids, of, holding) for ids, (_, of, holding) in zip(found, wanted, strict=True)]
            figures[way] = {
                "recall": round(statistics.fmean(len(ids & of) / len(of) for ids, of, _ in pairs), 3),
                "answer": round(statistics.fmean(bool(ids & holding) for ids, _, holding in pairs if holding), 3),
                "all": round(statistics.fmean(of <= ids for ids, of, _ in pairs), 3),
            }
            print(way, figures[way], file=sys.stderr)
    print(json.dumps({"passages": len(corpus), "questions": len(wanted), "top_k": options.top_k, **figures}))


if __name__ == "__main__":
    main()
