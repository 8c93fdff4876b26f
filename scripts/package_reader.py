"""Puts a trained reader, a corpus and questions about it where the package ships them from.

    python scripts/package_reader.py runs/reader/reader                # a folder that train_reader exported
    python scripts/package_reader.py runs/reader/reader --seed 2026 --articles 210 --questions 80

Corpus and questions are of the test split: the reader saw none of their names' facts in training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from cacheblend.cli.model import CORPUS, QUESTIONS, READER
from cacheblend.eval.world import make_cases, write_corpus

LARGEST = 16 * 2**20


def main() -> None:
    """Copy, write, check the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", type=Path, help="folder with config.json, model.safetensors, tokenizer.json")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--articles", type=int, default=210, help="a multiple of 30; the questions are about them")
    parser.add_argument("--questions", type=int, default=80)
    options = parser.parse_args()
    if options.articles % 30:
        parser.error(f"--articles {options.articles}: give a multiple of 30, so that the questions are about the corpus")
    READER.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(options.reader / name, READER / name)
    CORPUS.unlink(missing_ok=True)
    write_corpus(CORPUS, options.seed, options.articles)
    ids = {json.loads(line)["id"] for line in CORPUS.read_text(encoding="utf-8").splitlines()}
    # As many cases as articles, so that they are about the corpus' own world; the first of them ship.
    cases = make_cases(options.seed, options.articles)[: options.questions]
    with QUESTIONS.open("w", encoding="utf-8") as file:
        for case in cases:
            gold = sorted({chunk.document for chunk in case.chunks if chunk.is_gold})
            assert ids.issuperset(gold), "a question is about an article that is not in the corpus"
            line = {"question": case.question, "answers": case.answers, "class": case.question_class, "gold": gold}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    size = sum(path.stat().st_size for path in READER.iterdir())
    print(f"{READER}: {size / 2**20:.1f} MiB, {len(ids)} articles, {len(cases)} questions")
    if size > LARGEST:
        raise SystemExit(f"that is more than {LARGEST / 2**20:.0f} MiB: too large to ship")


if __name__ == "__main__":
    main()
