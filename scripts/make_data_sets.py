"""The files of `cacheblend eval` out of their public originals, for the figures of docs/benchmarks.md.

    python scripts/make_data_sets.py musique_dev musique_ans_v1.0_dev.jsonl --out data

`data_sets.json` names the cases, and the digest of each published one: a case that differs is reported. Originals: MuSiQue's
`musique_ans_v1.0_dev.jsonl`, 2WikiMultihopQA's `dev.json`, HotpotQA's `hotpot_dev_distractor_v1.json`.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from cacheblend.eval.data import DATA_SETS

CASES = Path(__file__).with_name("data_sets.json")


def example(raw: dict[str, Any]) -> dict[str, Any]:
    """A case of an original in the schema of docs/evaluation.md."""
    if "paragraphs" in raw:  # MuSiQue
        passages = [{"title": one["title"], "text": one["paragraph_text"].strip()} for one in raw["paragraphs"]]
    else:  # a sentence of HotpotQA begins with its space, one of 2Wiki does not
        passages = [{"title": title, "text": " ".join(map(str.strip, sentences))} for title, sentences in raw["context"]]
    answers = list(dict.fromkeys([raw["answer"], *raw.get("answer_aliases", ())]))
    own = {"id": raw.get("id") or raw["_id"], "question": raw["question"].strip(), "answers": answers}
    return {**own, "passages": passages, "task": "qa"}


def digest(case: dict[str, Any]) -> str:
    """Twelve digits that tell a case from one with another text."""
    texts = [case["question"], *case["answers"], *(part for one in case["passages"] for part in (one["title"], one["text"]))]
    return hashlib.sha256("\n".join(" ".join(text.split()) for text in texts).encode()).hexdigest()[:12]


def main(arguments: list[str]) -> int:
    """The command; exits with 1 where cases are missing, or differ from the published ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = json.loads(CASES.read_text(encoding="utf-8"))
    parser.add_argument("name", choices=sorted(known))
    parser.add_argument("original", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data"))
    given = parser.parse_args(arguments)
    text, wanted = given.original.read_text("utf-8"), known[given.name]
    raws = json.loads(text) if text.startswith("[") else map(json.loads, filter(None, text.split("\n")))
    made = {case["id"]: case for case in map(example, raws) if case["id"] in wanted}
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / DATA_SETS[given.name].file).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(made[name], ensure_ascii=False) + "\n" for name in wanted if name in made)
    same = sum(digest(case) == wanted[name] for name, case in made.items())
    print(f"{len(made)} of {len(wanted)} cases, {same} of which are the published ones")
    return int(same < len(wanted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
