"""Bring your own retriever: any function that finds texts, and one call that answers over them from their stored KV.

python examples/plain_function.py --model path/to/model
"""

from __future__ import annotations

import argparse

from cacheblend.service import Answer, Engine, EngineConfig

PASSAGES = [
    {"title": "Travel", "text": "Journeys abroad are signed off by the head of the department, at least two weeks before."},
    {"title": "Expenses", "text": "Receipts are handed in within thirty days. Meals are paid up to forty euros a day."},
    {"title": "Leave", "text": "Everyone has thirty days of leave. Ten of them may be taken over into the next year."},
]


def find(question: str) -> list[dict[str, str]]:
    """Stands for your retriever: the passages that share most words with the question."""
    words = set(question.lower().split())
    return sorted(PASSAGES, key=lambda passage: -len(words & set(passage["text"].lower().split())))[:2]


def run(engine: Engine, question: str = "How many days of leave may be taken over?") -> list[Answer]:
    """Ask twice: the first time the passages' KV is computed, and stored; the second time it is blended."""
    answers = []
    for _ in range(2):
        # Without a ratio such a short prompt is computed in full, which is faster.
        answers.append(engine.answer(question, documents=find(question), recompute_ratio=0.14))
        engine.drain()  # so that the second one finds what the first one missed
    return answers


def main() -> None:
    """Run it on a model of yours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--store-dir", default="cacheblend-store")
    options = parser.parse_args()
    with Engine(EngineConfig(model=options.model, store_dir=options.store_dir)) as engine:
        for answer in run(engine):
            plan, timings = answer.plan, answer.timings
            print(f"{plan.hits} passages from the store, first token after {timings.ttft_s:.3f} s: {answer.text}")


if __name__ == "__main__":
    main()
