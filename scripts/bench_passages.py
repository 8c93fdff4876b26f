"""Passages found in prompts: the time of the look, and what is found, gained and lost over many requests.

python scripts/bench_passages.py look                                # 10,000 characters beside 100,000 stored chunks
python scripts/bench_passages.py zipf --model DIR --figure out.svg   # 5,000 requests over 2,000 passages, every question new
python scripts/bench_passages.py quality --model DIR                 # of applications, beside `documents` and full recompute
python scripts/bench_passages.py plain [--model DIR]                 # 1,000 prompts without passages: none may be blended
"""

import argparse
import csv
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from plain_prompts import Words, plain_prompts

from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.blend.widening import WIDE_RATIO
from cacheblend.eval.handbook import handbook_documents, handbook_questions
from cacheblend.eval.metrics import equal_greedy_tokens, paired_difference
from cacheblend.retriever import Chunk
from cacheblend.retriever.passages import StoredTexts, find_passages
from cacheblend.service import Answer, Engine, EngineConfig
from cacheblend.service.engine.prompt import Message
from cacheblend.service.engine.request import Request
from cacheblend.service.http.chat import lay_out_chat, lay_out_completion
from cacheblend.service.http.schemas import ChatBody, CompletionBody

CHUNKS, CHARACTERS, ROUNDS = 100_000, 10_000, 50
PASSAGES, IN_A_PROMPT, COMPARED_EVERY = 2000, 6, 25
RATIO = 0.14  # named, as without it a small model computes short prompts in full
TIMED_PROMPTS, TIMED_ROUNDS = 9, 2  # of those without passages: one of each kind
RECIPES = Path(__file__).parents[1] / "tests" / "service" / "http" / "recipes.json"
RECORDED_QUESTION = "What can be seen there today?"
# How the recorded applications mark a passage that is empty.
MARKS = "|".join(
    (
        r'\n?<source id="\d" name="file\d\.md"></source>',
        r"\n\[\d\] (?=\n)",
        r"file_name: a\.md\s+",
        r'\{"id": \d, "text": ""\}(, )?',
    )
)
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
    """A message with passages as sources."""
    return INSTRUCTION + "\n".join(f'<source id="{n}">{text}</source>' for n, text in enumerate(texts, 1)) + f"\n\n{question}"


def zipf(engine: Engine, requests: int, figure: Path | None) -> dict[str, Any]:
    """By hundred requests: the share of cached tokens in the prompts, and full recompute's tokens and TTFT over the blend's.

    Full recompute runs the prompt's tokens, a blend those that it recomputes, in the mean of the layers: a large model's gain.
    """
    draw, words = random.Random(2), Words(2)
    texts = [words.text(3) for _ in range(PASSAGES)]
    weights = [1 / rank for rank in range(1, PASSAGES + 1)]
    rows, began = list[tuple[int, float, float, float]](), time.perf_counter()
    for first in range(0, requests, 100):
        cached = prompt_tokens = 0
        tokens_run, ratios = 0.0, list[float]()
        for number in range(first, first + 100):
            chosen = list(dict.fromkeys(draw.choices(texts, weights, k=3 * IN_A_PROMPT)))[:IN_A_PROMPT]
            text = with_sources(chosen, f"What is said of number {number}?")
            answer = engine.complete(prepare(engine, text, max_tokens=1, recompute_ratio=RATIO))
            cached += answer.plan.cached_tokens
            tokens_run += statistics.mean(map(len, answer.plan.recomputed))
            prompt_tokens += answer.plan.prompt_tokens
            if number % COMPARED_EVERY == 0:
                exact = engine.complete(prepare(engine, text, max_tokens=1, method="full_recompute"))
                ratios.append(exact.timings.ttft_s / answer.timings.ttft_s)
            engine.drain()
        speed_up = statistics.median(ratios)
        rows.append((first + 100, round(cached / prompt_tokens, 3), round(prompt_tokens / tokens_run, 2), round(speed_up, 2)))
        print(
            "{:5} requests: {:.2f} of the tokens are cached, {:.1f} x the tokens, {:.1f} x the time".format(*rows[-1]),
            flush=True,
        )
    if figure is not None:
        draw_zipf(rows, figure)
    (_, *last), seconds = (statistics.median(of) for of in zip(*rows[-10:], strict=True)), time.perf_counter() - began
    medians = dict(zip(("cached", "tokens_ratio", "ttft_ratio"), last, strict=True))
    return {"requests": requests, "seconds": round(seconds), "last_thousand": medians, "stored": len(engine.store.ls())}


def draw_zipf(rows: Sequence[tuple[int, float, float, float]], figure: Path) -> None:
    """Draw what `zipf` measures, and write it beside the figure as CSV."""
    from matplotlib import pyplot

    with figure.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("requests", "cached", "tokens_ratio", "ttft_ratio"), *rows])
    requests, cached, ratios, _ = zip(*rows, strict=True)
    drawn, axes = pyplot.subplots(figsize=(7, 3))
    axes.plot(requests, cached, label="share of the prompts' tokens that are cached")
    axes.set(xlabel="requests: six of 2,000 passages by Zipf's law, and a new question", ylabel="cached", ylim=(0, 1))
    beside = axes.twinx()
    beside.plot(requests, ratios, color="tab:orange", label="the prompt's tokens over those that are run")
    beside.set(ylabel="tokens over tokens run", ylim=(0, None))
    drawn.legend(loc="lower right", bbox_to_anchor=(0.9, 0.2))
    drawn.savefig(figure, bbox_inches="tight", dpi=120)


def rewritten(value: Any, old: Sequence[str], new: Sequence[str], question: str) -> Any:
    """A request that an application's own library wrote, about other passages and another question.

    The passages of a tool's result stand in JSON.
    """
    if isinstance(value, dict):
        return {key: rewritten(one, old, new, question) for key, one in value.items()}
    if isinstance(value, list):
        return [rewritten(one, old, new, question) for one in value]
    if not isinstance(value, str):
        return value
    in_json = value.startswith("[{")
    for before, after in zip(sorted(filter(value.__contains__, old), key=value.index), new, strict=False):
        value = value.replace(before, json.dumps(after)[1:-1] if in_json else after)
    return value.replace(RECORDED_QUESTION, question)


def without_passages(value: Any) -> Any:
    """A rewritten request without the marks of its passages, which are empty."""
    if isinstance(value, dict):
        return {key: without_passages(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_passages(one) for one in value]
    return re.sub(MARKS, "", value) if isinstance(value, str) else value


def prepare_body(engine: Engine, body: dict[str, Any], **options: Any) -> Request:
    """A request of a body that a client sends, laid out as the service does."""
    if "prompt" in body:
        (layout,) = lay_out_completion(engine, CompletionBody.model_validate(body), 0)
    else:
        layout = lay_out_chat(engine, ChatBody.model_validate(body), {})
    return engine.prepare(**{**layout, **options})


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure."""
    return {key: round(statistics.mean(row[key] for row in rows), 4) for key in rows[0]}


def over_documents(rows: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """TTFT over that of the same request with `documents`: of the means, and the median where both widen or neither does."""
    of_one_kind = [row["ttft_s"] / row["documents_ttft_s"] for row in rows if row["widened"] == row["documents_widened"]]
    mean = statistics.mean(row["ttft_s"] for row in rows) / statistics.mean(row["documents_ttft_s"] for row in rows)
    median = round(statistics.median(of_one_kind), 3) if of_one_kind else None
    return {"mean": round(mean, 3), "median": median, "pairs": len(of_one_kind)}


def compared(engine: Engine, make: Callable[..., Request], beside: Callable[..., Request], tokens: int) -> dict[str, float]:
    """A request with `tokens` of passages in its text, beside its own full recompute and the same one with `documents`."""
    answers, logits = list[Answer](), list[Any]()
    for method in ("full_recompute", "blend"):
        request = make(max_tokens=16, method=method)
        answers.append(engine.complete(request))
        logits.append(request.fused.logits)
        request.release()
    full, blended = answers
    documents = engine.complete(beside(max_tokens=1))
    return {
        "hits": blended.plan.cached_tokens / tokens,
        "ttft_s": blended.timings.ttft_s,
        "documents_ttft_s": documents.timings.ttft_s,
        "full_s": full.timings.ttft_s,
        "kl": first_token_kl_nats(*logits),
        "equal_tokens": equal_greedy_tokens(full.token_ids, blended.token_ids),
        "widened": float(blended.plan.recompute_ratio == WIDE_RATIO),
        "documents_widened": float(documents.plan.recompute_ratio == WIDE_RATIO),
    }


def quality(engine: Engine, cases: int, measured: Path | None) -> dict[str, Any]:
    """Passages in applications' own words, in another order, beside full recompute and the same request with `documents`.

    Each question is written to `measured` as a line; those that stand there are not measured again.
    """
    recorded = json.loads(RECIPES.read_text(encoding="utf-8"))
    bodies = {name: requests[-1]["body"] for name, requests in recorded["requests"].items()}
    if not engine.prompts.template.takes_tools:
        del bodies["agent"]
    engine.ingest(handbook_documents())
    done = [] if measured is None or not measured.exists() else list(map(json.loads, measured.read_text().splitlines()))
    for number, item in enumerate(handbook_questions()[:cases]):
        if number in {case["question"] for case in done}:
            continue
        texts = [one.chunk.text.strip() for one in engine.search(item.question, 4)]
        asked, beside, draw = dict[str, Callable[..., Request]](), dict[str, Callable[..., Request]](), random.Random(number)
        brought: dict[str, Any] = {"documents": [{"text": one} for one in reversed(texts)]}
        for name, body in bodies.items():
            about = rewritten(body, recorded["texts"], draw.sample(texts, len(texts)), item.question)
            without = {**without_passages(rewritten(body, recorded["texts"], [""] * len(texts), item.question)), **brought}
            asked[name] = partial(prepare_body, engine, about)
            beside[name] = partial(prepare_body, engine, without, **brought)
        natural = {"messages": [{"role": "user", "content": item.question}], **brought}
        asked["documents"] = beside["documents"] = partial(prepare_body, engine, natural, **brought)
        seen = [asked[name] for name in ("open_webui", "agent") if name in asked]  # a tool's result has its texts as JSON
        engine.complete(beside["f_string"](max_tokens=1))
        for make in (*seen, *seen):  # KV is stored at second sight; what is run would be in the prefix cache
            make(max_tokens=1).release()
        engine.drain()
        tokens = sum(len(engine.prompts.text_ids(one)) for one in texts)
        done.append({"question": number} | {name: compared(engine, asked[name], beside[name], tokens) for name in asked})
        print(line := json.dumps(done[-1]), flush=True)
        if measured is not None:
            with measured.open("a") as file:
                file.write(line + "\n")
    rows = {name: [case[name] for case in done] for name in (*bodies, "documents")}
    return {
        name: {**means(of), "ttft_over_documents": over_documents(of)} | over(of, rows["documents"])
        for name, of in rows.items()
    }


def over(rows: Sequence[dict[str, float]], documents: Sequence[dict[str, float]]) -> dict[str, tuple[float | None, ...]]:
    """KL and equal tokens over those of `documents`, each question: the mean difference and its 95 % interval."""
    keys = ("kl", "equal_tokens")
    pairs = {key: paired_difference([row[key] for row in rows], [row[key] for row in documents]) for key in keys}
    return {f"{key}_over_documents": astuple(pair) for key, pair in pairs.items()}


def plain(requests: int) -> dict[str, Any]:
    """How many prompts of code, schemas, logs, tables, verse, examples, instructions and chats have a passage to blend."""
    blended: dict[str, int] = {}
    for name, messages in plain_prompts(requests):
        blended[name] = blended.get(name, 0) + any(find_passages(text, role) for role, text in messages)
    return {"prompts": requests, "blended": sum(blended.values()), "by_kind": blended}


def slowdown(engine: Engine) -> dict[str, Any]:
    """The look's processor time over the full prefill's, for one prompt of each kind."""
    shares: dict[str, float] = {}
    for name, messages in plain_prompts(TIMED_PROMPTS):
        layout = engine.prompts.chat([Message(*message) for message in messages], with_chunks=False)
        looks, prefills = list[float](), list[float]()
        for _ in range(TIMED_ROUNDS):
            began = time.process_time()
            engine.find_passages(messages)
            looks.append(time.process_time() - began)
            request = engine.prepare(messages[-1][1], layout=layout, num_chunks=0, max_tokens=1, method="full_recompute")
            engine.complete(request)
            prefills.append(time.process_time() - began - looks[-1])
        shares[name] = round(min(looks) / min(prefills), 5)
        print(f"{name:10} {1000 * min(looks):.2f} ms beside {1000 * min(prefills):.0f} ms of the prefill", flush=True)
    return {"worst_slowdown": max(shares.values()), "slowdown": shares}


def main() -> None:
    """Measure; the last line is a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("look", "zipf", "quality", "plain"))
    parser.add_argument("--model", help="see `cacheblend serve --help`")
    parser.add_argument("--requests", type=int, help="zipf: 5000, quality: 40, plain: 1000")
    parser.add_argument("--figure", type=Path, help="of zipf")
    parser.add_argument(
        "--measured", type=Path, help="of quality: a file of questions, a line each; a run goes on with what it lacks"
    )
    options = parser.parse_args()
    if options.what == "look":
        print(json.dumps(look()))
        return
    without_passages = plain(options.requests or 1000) if options.what == "plain" else {}
    if without_passages and options.model is None:
        print(json.dumps(without_passages))
        return
    if options.model is None:
        parser.error("--model is needed")
    with tempfile.TemporaryDirectory() as folder, Engine(EngineConfig(model=options.model, store_dir=folder)) as engine:
        measured = {
            "zipf": lambda: zipf(engine, options.requests or 5000, options.figure),
            "quality": lambda: quality(engine, options.requests or 40, options.measured),
            "plain": lambda: without_passages | slowdown(engine),
        }[options.what]()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
