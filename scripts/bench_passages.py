"""Passages found in prompts: the time of the look, and what is found, gained and lost over many requests.

python scripts/bench_passages.py look                                # 10,000 characters beside 100,000 stored chunks
python scripts/bench_passages.py zipf --model DIR --figure out.svg   # 5,000 requests over 2,000 passages, every question new
python scripts/bench_passages.py quality --model DIR                 # beside `documents` and full recompute, on the handbook
python scripts/bench_passages.py plain --model DIR                   # 1,000 prompts without passages: none may be blended
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.eval.handbook import handbook_documents, handbook_questions
from cacheblend.eval.metrics import equal_greedy_tokens
from cacheblend.retriever import Chunk
from cacheblend.retriever.passages import StoredTexts, find_passages
from cacheblend.service import Answer, Engine, EngineConfig
from cacheblend.service.engine.prompt import Message
from cacheblend.service.engine.request import Request

CHUNKS, CHARACTERS, ROUNDS = 100_000, 10_000, 50
PASSAGES, IN_A_PROMPT, COMPARED_EVERY = 2000, 6, 10
INSTRUCTION = "Answer from the sources.\n\n"


def texts_of(draw: random.Random, count: int, sentences: int = 6) -> list[str]:
    """Random passages of made-up words."""
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    pool = [" ".join(draw.choices(words, k=draw.randint(6, 16))).capitalize() + "." for _ in range(20_000)]
    return [" ".join(draw.choices(pool, k=sentences)) for _ in range(count)]


def look() -> dict[str, Any]:
    """Milliseconds, the median and the longest, for three prompts."""
    draw = random.Random(1)
    texts = texts_of(draw, CHUNKS)
    stored = StoredTexts(lambda id_: Chunk("d", "v", id_, "", texts[id_], ()))
    began = time.perf_counter()
    stored.add((id_, "", text) for id_, text in enumerate(texts))
    figures: dict[str, Any] = {"chunks": CHUNKS, "index_s": round(time.perf_counter() - began, 3)}
    prompts = {
        "stored chunks": "\n".join(f"<source>{text}</source>" for text in draw.choices(texts, k=CHARACTERS // 400)),
        "paragraphs": "\n\n".join(texts_of(draw, CHARACTERS // 400, sentences=7)),
        "a text": " ".join(texts_of(draw, CHARACTERS // 350)),
    }
    for name, prompt in prompts.items():
        text, taken = prompt[:CHARACTERS].ljust(CHARACTERS, "."), list[float]()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            found = find_passages(f"Answer.\n\n{text}", "user", stored)
            taken.append(1000 * (time.perf_counter() - began))
        median, longest = statistics.median(taken), max(taken)
        figures[name] = {"found": len(found), "median_ms": round(median, 3), "longest_ms": round(longest, 3)}
        print(f"{name:14} {len(found):3} found, {median:.2f} ms in the median, {longest:.2f} at most")
    return figures


def prepare(engine: Engine, text: str, **options: Any) -> Request:
    """A request of a user's message, looked through for passages as the service does."""
    layout = engine.prompts.chat([Message("user", text)], with_chunks=False)
    return engine.prepare(text, layout=layout, passages=engine.find_passages([("user", text)]), num_chunks=0, **options)


def with_sources(texts: Sequence[str], question: str) -> str:
    """A message as Open WebUI writes it."""
    return INSTRUCTION + "\n".join(f'<source id="{n}">{text}</source>' for n, text in enumerate(texts, 1)) + f"\n\n{question}"


def zipf(engine: Engine, requests: int, figure: Path | None) -> dict[str, Any]:
    """Share of the passages' tokens that are hits, and full recompute's TTFT over the blend's, by hundred requests."""
    draw = random.Random(2)
    texts = texts_of(draw, PASSAGES, sentences=5)
    tokens = {text: len(engine.prompts.text_ids(text)) for text in texts}
    weights = [1 / rank for rank in range(1, PASSAGES + 1)]
    shares, speed_ups = list[float](), list[float]()
    for first in range(0, requests, 100):
        cached = whole = 0
        ratios: list[float] = []
        for number in range(first, first + 100):
            chosen = list(dict.fromkeys(draw.choices(texts, weights, k=3 * IN_A_PROMPT)))[:IN_A_PROMPT]
            text = with_sources(chosen, " ".join(texts_of(draw, 1, sentences=1)) if number % 100 == 0 else f"What is {number}?")
            answer = engine.complete(prepare(engine, text, max_tokens=1))
            cached, whole = cached + answer.plan.cached_tokens, whole + sum(tokens[one] for one in chosen)
            if number % COMPARED_EVERY == 0:
                exact = engine.complete(prepare(engine, text, max_tokens=1, method="full_recompute"))
                ratios.append(exact.timings.ttft_s / answer.timings.ttft_s)
            engine.drain()
        shares.append(cached / whole)
        speed_ups.append(statistics.median(ratios))
        print(f"{first + 100:5} requests: {shares[-1]:.2f} of the passages' tokens are hits, {speed_ups[-1]:.1f} x", flush=True)
    if figure is not None:
        from matplotlib import pyplot

        drawn, axes = pyplot.subplots(figsize=(7, 3))
        axes.plot(range(100, requests + 1, 100), shares, label="hits, share of the passages' tokens")
        axes.plot(range(100, requests + 1, 100), [one / max(speed_ups) for one in speed_ups], label="speed-up over its largest")
        axes.set(xlabel="requests", ylim=(0, 1.05))
        axes.legend()
        drawn.savefig(figure, bbox_inches="tight")
    return {"hits": [round(one, 3) for one in shares], "speed_up": [round(one, 2) for one in speed_ups]}


def quality(engine: Engine, cases: int) -> dict[str, Any]:
    """Passages in a message at second sight, in another order, beside `documents`; each against its own full recompute."""
    draw = random.Random(3)
    engine.ingest(handbook_documents())
    rows: dict[str, list[dict[str, float]]] = {"found": [], "documents": []}
    for item in handbook_questions()[:cases]:
        texts = [one.chunk.text.strip() for one in engine.search(item.question, 6)]
        for _ in range(2):  # the KV of what was not ingested word for word is stored at second sight
            engine.complete(prepare(engine, with_sources(draw.sample(texts, len(texts)), "What is this?"), max_tokens=1))
            engine.drain()
        text = with_sources(draw.sample(texts, len(texts)), item.question)
        documents: dict[str, Any] = {"documents": [{"text": one} for one in texts]}
        asked = {"found": partial(prepare, engine, text), "documents": partial(engine.prepare, item.question, **documents)}
        engine.complete(asked["documents"](max_tokens=1))
        engine.drain()
        for name, make in asked.items():
            answers, logits = list[Answer](), list[Any]()
            for method in ("full_recompute", "blend"):
                request = make(max_tokens=16, method=method)
                answers.append(engine.complete(request))
                logits.append(request.fused.logits)
                request.release()
            hits = answers[1].plan.cached_tokens / sum(len(engine.prompts.text_ids(one)) for one in texts)
            rows[name].append(
                {
                    "hits": hits,
                    "ttft_s": answers[1].timings.ttft_s,
                    "full_s": answers[0].timings.ttft_s,
                    "kl": first_token_kl_nats(*logits),
                    "equal_tokens": equal_greedy_tokens(answers[0].token_ids, answers[1].token_ids),
                }
            )
    figures = {name: {key: round(statistics.mean(row[key] for row in of), 4) for key in of[0]} for name, of in rows.items()}
    return {**figures, "ttft_over_documents": round(figures["found"]["ttft_s"] / figures["documents"]["ttft_s"], 3)}


def plain(engine: Engine, requests: int) -> dict[str, Any]:
    """How many prompts of code, chats, tables, logs, verse and instructions are blended at third sight; and the look's time."""
    draw = random.Random(4)
    words = " ".join(texts_of(draw, 20, sentences=2)).replace(".", "").lower().split()

    def some(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    kinds = {
        "code": lambda: "\n".join(f"    {some(1)} = {some(1)}({some(1)}, {draw.randint(0, 99)})" for _ in range(20)),
        "log": lambda: "\n".join(f"2026-11-{draw.randint(10, 28)} 12:00:{n:02} INFO {some(6)}" for n in range(20)),
        "table": lambda: "\n".join(f"| {some(1)} | {draw.randint(0, 999)} | {some(2)} |" for _ in range(20)),
        "verse": lambda: "\n".join(some(6) for _ in range(16)),
        "schema": lambda: json.dumps({some(1): {"type": "object", "description": some(8)} for _ in range(6)}, indent=1),
        "chat": lambda: f"{some(12).capitalize()}? {some(9).capitalize()}.",
        "orders": lambda: "\n\n".join(f"You must always {some(9)}. Never {some(8)}. Please {some(7)}." for _ in range(4)),
    }
    blended, shares = dict.fromkeys(kinds, 0), list[float]()
    for number in range(requests):
        name = list(kinds)[number % len(kinds)]
        text = f"{some(3)}\n\n{kinds[name]()}\n\n{some(5)}?"
        for _ in range(3):
            began = time.perf_counter()
            request = prepare(engine, text, max_tokens=1)
            took = time.perf_counter() - began
            answer = engine.complete(request)
            engine.drain()
        began = time.perf_counter()
        engine.find_passages([("user", text)])
        shares.append((time.perf_counter() - began) / (took + answer.timings.ttft_s))
        blended[name] += answer.plan.hits > 0
    return {"prompts": requests, "blended": blended, "look_share_of_ttft": round(statistics.median(shares), 5)}


def main() -> None:
    """Measure; the last line is a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("look", "zipf", "quality", "plain"))
    parser.add_argument("--model", help="see `cacheblend serve --help`")
    parser.add_argument("--requests", type=int, help="zipf: 5000, quality: 40, plain: 1000")
    parser.add_argument("--figure", type=Path, help="of zipf")
    options = parser.parse_args()
    if options.what == "look":
        print(json.dumps(look()))
        return
    if options.model is None:
        parser.error("--model is needed")
    with tempfile.TemporaryDirectory() as folder, Engine(EngineConfig(model=options.model, store_dir=folder)) as engine:
        measured = {
            "zipf": lambda: zipf(engine, options.requests or 5000, options.figure),
            "quality": lambda: quality(engine, options.requests or 40),
            "plain": lambda: plain(engine, options.requests or 1000),
        }[options.what]()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
