"""Time of the look through a prompt for passages, beside 100,000 stored chunks: `python scripts/bench_passages.py`."""

from __future__ import annotations

import json
import random
import statistics
import time

from cacheblend.retriever import Chunk
from cacheblend.retriever.passages import StoredTexts, find_passages

CHUNKS, CHARACTERS, ROUNDS = 100_000, 10_000, 50


def main() -> None:
    """Print milliseconds, the median and the longest, for three prompts, and at last a JSON object."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    sentences = [" ".join(draw.choices(words, k=draw.randint(6, 16))).capitalize() + "." for _ in range(20_000)]
    texts = [" ".join(draw.choices(sentences, k=6)) for _ in range(CHUNKS)]
    stored = StoredTexts(lambda id_: Chunk("d", "v", id_, "", texts[id_], ()))
    began = time.perf_counter()
    stored.add((id_, "", text) for id_, text in enumerate(texts))
    figures: dict[str, object] = {"chunks": CHUNKS, "index_s": round(time.perf_counter() - began, 3)}
    prompts = {
        "stored chunks": "\n".join(f"<source>{text}</source>" for text in draw.choices(texts, k=CHARACTERS // 400)),
        "paragraphs": "\n\n".join(" ".join(draw.choices(sentences, k=7)) for _ in range(CHARACTERS // 400)),
        "a text": " ".join(draw.choices(sentences, k=CHARACTERS // 60)),
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
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
