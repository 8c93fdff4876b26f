"""Recall of the ways to search: hybrid, and hybrid with a second round, over the passages of a data set.

    python scripts/measure_retrieval.py 2wikimqa_sharedcorpus1000.jsonl.gz --cases 300
    python scripts/measure_retrieval.py FILE --answers --model smollm2-135m --chunk-tokens 512 --out rows.jsonl

All passages of all cases are one corpus: each is a document of one chunk. With `--chunk-tokens` passages of one title are one
document, as in a user's file, split as the service does. Gold documents of a question are those of its own case's passages that
hold an answer or whose title the question names. `recall`: their share among the documents of the `--num-chunks` chunks found;
`answer`: whether one of these chunks is of a gold document and holds an answer; `all`: whether chunks of all gold documents are
there; in the mean.

With `--answers` the model answers each question from what was found, by full recompute and by blending as the default preset
does, or at `--ratio`, the KV of all chunks stored. `f1` is SQuAD's; `contains`: whether a right answer stands in the model's,
both as SQuAD compares them;
`gold_nll_nats`: of the right answer that full recompute finds likeliest; `first_token_kl_nats`: from full recompute;
`nll_over_full`: the blend's NLL above full recompute's, its mean, the bounds of its 95 % interval, and its median.

The first line of `--out` is the set-up, then comes a line a case; the same call goes on after the last one. The last line on
stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.base.options import GIB
from cacheblend.blend import Fusor
from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.blend.loading import load_tokenizer
from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.eval.data.caching_embedder import CachingEmbedder
from cacheblend.eval.data.file_source import read_examples
from cacheblend.eval.data.request import Example, Passage
from cacheblend.eval.data.source import SHORT_ANSWER, answer_ids
from cacheblend.eval.metrics import answer_nll_nats, f1, normalize, paired_difference
from cacheblend.retriever import (
    Document,
    Retriever,
    RetrieverConfig,
    ScoredChunk,
    SentenceTransformerEmbedder,
    in_reading_order,
)
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.engine.engine import Engine
from cacheblend.store import StoreConfig

WAYS: dict[str, dict[str, Any]] = {
    "hybrid": {"search_rounds": 1},
    "hybrid, 2 rounds": {"search_rounds": 2},
}
METHODS = ("full_recompute", "blend")
WHOLE = 8192  # chunk_tokens that no passage exceeds
ANSWER_TOKENS = 32
STORE_BYTES = 8 * GIB  # of the chunks used last; others are computed anew where they are found again
NO_ANSWER = {"", "yes", "no"}  # stand in no passage


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and what a search for it should find.

    Args:
        example: the question, and its right answers.
        gold: documents to be found.
        holding: those of them that hold an answer.
    """

    example: Example
    gold: frozenset[str]
    holding: frozenset[str]

    @classmethod
    def of(cls, example: Example, ids: Mapping[Passage, str]) -> Case:
        """The case of an example, given the id of each passage's document."""
        answers = _answers(example)
        holding = {ids[one] for one in example.passages if any(answer in _plain(one.text) for answer in answers)}
        names = {ids[one]: _plain(re.sub(r"\(.*?\)", "", one.title)) for one in example.passages}
        named = {id_ for id_, name in names.items() if name.strip() and name in _plain(example.question)}
        return cls(example, frozenset(holding | named), frozenset(holding))

    def marks(self, found: Sequence[ScoredChunk]) -> dict[str, float | bool | None]:
        """Marks of what was found of it; no `answer` where no passage holds one."""
        ids, answers = {one.chunk.document_id for one in found}, _answers(self.example)
        texts = [_plain(one.chunk.text) for one in found if one.chunk.document_id in self.holding]
        return {
            "recall": len(ids & self.gold) / len(self.gold),
            "answer": any(answer in text for answer in answers for text in texts) if self.holding else None,
            "all": self.gold <= ids,
        }


def _plain(text: str) -> str:
    """Lower-case words between single spaces, with one at either end."""
    return f" {re.sub(r'[^0-9a-z]+', ' ', text.lower()).strip()} "


def _answers(example: Example) -> list[str]:
    return [plain for answer in example.answers if (plain := _plain(answer)).strip() not in NO_ANSWER]


def make_corpus(examples: Sequence[Example], *, joins_titles: bool) -> tuple[dict[str, dict[str, str]], dict[Passage, str]]:
    """The corpus: its documents by id, and the id of each passage's document; those of one title may be one document."""
    passages = dict.fromkeys(one for example in examples for one in example.passages)
    parts: dict[str | Passage, list[Passage]] = {}
    for one in passages:
        parts.setdefault((joins_titles and one.title) or one, []).append(one)
    corpus, ids = dict[str, dict[str, str]](), dict[Passage, str]()
    for own in parts.values():
        document = {"title": own[0].title, "text": "\n\n".join(one.text for one in own)}
        id_ = Document.of(document).id
        corpus[id_] = document
        ids |= dict.fromkeys(own, id_)
    return corpus, ids


class Answerer:
    """Has the model answer from what was found.

    Args:
        engine: has the corpus in its index.
        corpus: its documents by id.
        ratio: blends recompute so much; None for what the engine's preset does.
        best_last: the chunks stand in the opposite order, the nearest one beside the question.
    """

    def __init__(self, engine: Engine, corpus: Mapping[str, Mapping[str, str]], ratio: float | None, best_last: bool) -> None:
        self._engine, self._corpus, self._ratio, self._best_last = engine, corpus, ratio, best_last

    def marks(self, example: Example, found: Sequence[ScoredChunk]) -> dict[str, dict[str, Any]]:
        """Each method's answer, and how good that is."""
        engine, fusor = self._engine, self._engine.fusor
        # 1. Have the KV of the chunks stored; only what some question finds is computed.
        engine.ingest([self._corpus[id_] for id_ in dict.fromkeys(one.chunk.document_id for one in found)])
        # 2. Answer from the same chunks by each method, full recompute first: it says which right answer is meant.
        marks: dict[str, dict[str, Any]] = {}
        chunks = [one.chunk for one in in_reading_order(found)]
        golds = [ids for answer in example.answers if (ids := answer_ids(engine.prompts, answer))]
        full_V = None
        for method in METHODS:
            request = engine.prepare(
                SHORT_ANSWER.question.format(question=example.question),
                documents=chunks[::-1] if self._best_last else chunks,
                method=method,
                recompute_ratio=self._ratio,
                max_tokens=ANSWER_TOKENS,
            )
            answer = engine.complete(request)
            plan = answer.plan
            nll, gold = min((answer_nll_nats(fusor, request.fused, ids), ids) for ids in golds)
            golds = [gold]
            full_V = request.fused.logits if full_V is None else full_V
            text = SHORT_ANSWER.answer_in(answer.text)
            marks[method] = {
                "text": text,
                "f1": f1(text, example.answers),
                "contains": any(f" {normalize(answer)} " in f" {normalize(text)} " for answer in example.answers),
                "gold_nll_nats": nll,
                "first_token_kl_nats": first_token_kl_nats(full_V, request.fused.logits),
                "prompt_tokens": plan.prompt_tokens,
                "recompute_ratio": plan.recompute_ratio,
                "hits": plan.hits,
                "misses": plan.misses,
            }
        return marks


@contextmanager
def opened(
    options: argparse.Namespace, way: str, folder: Path, fusor: Fusor | None, corpus: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[Retriever, Answerer | None]]:
    """The retriever of a way to search, with the corpus in it, and what answers, if anything shall."""
    chunk_tokens, embedder = options.chunk_tokens or WHOLE, CachingEmbedder(SentenceTransformerEmbedder())
    config = RetrieverConfig(chunk_tokens=chunk_tokens, **WAYS[way])

    def report(done: int, total: int) -> None:
        if done % 500 == 0 or done == total:
            print(f"{way}: {done} of {total} documents in the index", file=sys.stderr)

    if fusor is None:
        tokenizer = load_tokenizer(options.model)
        with Retriever(replace(config, directory=folder), tokenizer, embedder) as retriever:
            retriever.add(corpus.values(), report)
            yield retriever, None
        return
    has_template = fusor.tokenizer.chat_template is not None
    engine_config = EngineConfig(
        model=options.model,
        store_dir=folder,
        instruction=SHORT_ANSWER.instruction if has_template else SHORT_ANSWER.text_instruction,
        context_filler=options.context_filler,
        retriever=config,
        store=StoreConfig(nvme_budget_bytes=STORE_BYTES),
    )
    with Engine(engine_config, fusor=fusor, embedder=embedder) as engine:
        engine.retriever.add(corpus.values(), report)
        yield engine.retriever, Answerer(engine, corpus, options.ratio, options.best_last)


class Rows:
    """The cases of a run, in a file if one is named, so that a later call goes on with it.

    Args:
        path: the file; None for memory.
        setup: what the run depends on.

    Raises:
        InputError: the file is of another set-up.
    """

    def __init__(self, path: Path | None, setup: Mapping[str, Any]) -> None:
        self._path, self.rows = path, list[dict[str, Any]]()
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps(setup) + "\n", encoding="utf-8")
        first, *others = path.read_text(encoding="utf-8").split("\n")
        if json.loads(first) != json.loads(json.dumps(setup)):
            raise InputError(f"{path} is of another set-up: {first}; choose another --out")
        self.rows = [json.loads(line) for line in others[:-1]]  # after the last line break stands what was cut off
        whole = "\n".join([first, *others[:-1], ""])
        path.write_text(whole, encoding="utf-8")

    def __contains__(self, case: tuple[str, str]) -> bool:
        return any((row["way"], row["id"]) == case for row in self.rows)

    def append(self, row: dict[str, Any]) -> None:
        """Keep a case."""
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def figures(self, way: str) -> dict[str, Any]:
        """The means of a way to search."""
        own = [row for row in self.rows if row["way"] == way]
        figures: dict[str, Any] = {}
        for name in ("recall", "answer", "all"):
            marks = [row[name] for row in own if row[name] is not None]
            figures[name] = round(statistics.fmean(marks), 3) if marks else None
        if own and own[0]["answers"]:
            for method in METHODS:
                answers = [row["answers"][method] for row in own]
                names = ("f1", "contains", "gold_nll_nats", "first_token_kl_nats", "prompt_tokens")
                figures[method] = {name: round(statistics.fmean(one[name] for one in answers), 3) for name in names}
            full, blended = ([row["answers"][method]["gold_nll_nats"] for row in own] for method in METHODS)
            over = paired_difference(blended, full)
            median = statistics.median(one - other for one, other in zip(blended, full, strict=True))
            bounds = (over.mean, over.low, over.high, median)
            figures["nll_over_full"] = [None if bound is None else round(bound, 3) for bound in bounds]
        return figures


# Options that the figures depend on.
DEPENDS_ON = (
    "every",
    "num_chunks",
    "model",
    "answers",
    "prompt",
    "chunk_tokens",
    "ratio",
    "best_last",
    "after_another",
    "context_filler",
)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument(
        "--every", type=int, default=1, help="take one of so many cases: those of an article may follow each other"
    )
    parser.add_argument("--num-chunks", type=int, default=6)
    parser.add_argument("--way", action="append", choices=WAYS, help="one to measure, may be repeated; left out, all")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokens chunks have, and which answers")
    parser.add_argument("--after-another", action="store_true", help="each question comes after the one of the next case")
    parser.add_argument("--answers", action="store_true", help="have the model answer from what was found")
    parser.add_argument(
        "--prompt", default="auto", choices=["auto", "few-shot"], help="auto: a chat where the model has a template"
    )
    parser.add_argument("--ratio", type=float, help="recompute ratio of the blend; left out, the default preset")
    parser.add_argument(
        "--best-last", action="store_true", help="chunks in the opposite order, the nearest beside the question"
    )
    parser.add_argument("--context-filler", default="auto", help="see the engine's option: auto, none, or a text file")
    parser.add_argument("--chunk-tokens", type=int, help="join passages of one title, split into chunks of so many")
    parser.add_argument("--out", type=Path, help="a line a case; a file that is there is gone on with")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object on stdout: no table before it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = read_options(arguments)
    ways = options.way or list(WAYS)

    # 1. The corpus, and what should be found in it.
    examples = list(read_examples(options.file))
    corpus, ids = make_corpus(examples, joins_titles=options.chunk_tokens is not None)
    asked = examples[:: options.every][: options.cases]
    cases = [case for example in asked if (case := Case.of(example, ids)).gold]
    setup = {"file": options.file.name, "passages": len(ids), "documents": len(corpus), "questions": len(cases)} | {
        name: getattr(options, name) for name in DEPENDS_ON
    }
    rows = Rows(options.out, setup)
    questions = [case.example.question for case in cases]
    before = dict(zip(questions, (*questions[1:], questions[0]), strict=True)) if options.after_another else {}
    print(f"{len(ids)} passages, {len(corpus)} documents, {len(cases)} questions", file=sys.stderr)

    # 2. Each way to search; texts are embedded and KV is computed once.
    fusor = Fusor.from_pretrained(options.model, dtype="auto") if options.answers else None
    if fusor is not None and options.prompt == "few-shot":
        fusor.tokenizer.chat_template = None  # the engine then writes plain texts
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            missing = [case for case in cases if (way, case.example.id) not in rows]
            if missing:
                with opened(options, way, Path(folder), fusor, corpus) as (retriever, answerer):
                    for place, case in enumerate(missing, start=1):
                        question = case.example.question
                        found = retriever.search(question, options.num_chunks, earlier_question=before.get(question, ""))
                        answers = answerer.marks(case.example, found) if answerer else {}
                        rows.append({"way": way, "id": case.example.id, **case.marks(found), "answers": answers})
                        print(f"{way}: {place} of {len(missing)} questions", end="\r", file=sys.stderr)
            print(f"{way}: {rows.figures(way)}", file=sys.stderr)

    # 3. The figures.
    figures = {way: rows.figures(way) for way in ways}
    if not options.json:
        print(table(figures))
    print(json.dumps({**setup, **figures}))


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as Markdown: what was found, and with answers a row for each method."""
    lines = [
        "| found by | recall | answer | all | answered by | F1 | contains | gold NLL | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = ("f1", "contains", "gold_nll_nats", "first_token_kl_nats")
    for way, own in figures.items():
        found = f"| {way} | {own['recall']} | {own['answer']} | {own['all']} "
        methods = [(method, own[method]) for method in METHODS if method in own] or [("", dict[str, Any]())]
        lines += [f"{found}| {method} | {' | '.join(str(one.get(name, '')) for name in names)} |" for method, one in methods]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
