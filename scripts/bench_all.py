"""Measure the tables and pictures of docs/benchmarks.md, and write them between their markers `<!-- bench:NAME -->` there.

    python scripts/bench_all.py --data DIR                # some hours on two cores, nothing beside it
    python scripts/bench_all.py --data DIR --quick        # a few cases of each in minutes, printed; pictures into runs/figures
    python scripts/bench_all.py --data DIR --table ttft   # one table; may be repeated

DIR holds the files of the data sets, see docs/evaluation.md. The tables are made of what other commands print as JSON. The
pictures are the paper's figures 12 and 16 (`ratio`), 14 (`load`) and 15 (`ttft`), each with its points as CSV beside it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attack_tenants import served

from cacheblend.blend import DEFAULT_RATIO
from cacheblend.eval.data import find_file
from cacheblend.eval.run.folder import commit
from cacheblend.eval.run.report import Point, draw_lines
from cacheblend.store.codecs import CODECS

MODELS = ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
SCRIPTS = Path(__file__).parent
SEARCH, PAGE = SCRIPTS / "measure_retrieval.py", SCRIPTS.parent / "docs" / "benchmarks.md"
SETS = {"squad_shared": (6, 100), "hotpotqa": (10, 50), "2wikimqa_dev": (10, 89), "musique_dev": (12, 40)}  # passages, cases
DRAWN = ("hotpotqa", "squad_shared")
SEARCHED = ("2wikimqa_shared", "squad_shared", "musique_dev")
RATIOS = (0.05, 0.1, DEFAULT_RATIO, 0.2, 0.3, 0.5)
WAYS = ("hybrid", "hybrid, 2 rounds")
TABLES = ("quality", "ratio", "ttft", "load", "ingest", "retrieval")
WAYS_TO_BLEND = ("balanced", "blend", "blend_hkvd")
SERVED = "full_recompute,prefix_cache,full_reuse,blend"
RATES = "0.05,0.1,0.2,0.4"
TIMES = {"0.0": "ratio 0", "settled": "settled", "widened": "widened", str(DEFAULT_RATIO): f"ratio {DEFAULT_RATIO:g}"}
NUMBERS, LENGTHS = (2, 4, 8, 16), (128, 256, 512, 1024)  # of chunks, and the tokens of one of six
COMPUTE, KL, NLL = "compute_share", "first_token_kl_nats", "gold_nll_over_full_nats"


def run(*command: object) -> dict[str, Any]:
    """Run a Python command, and return the JSON object on its last line."""
    done = subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(header: str, rows: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown; bars part the header's cells."""
    lines = [header.split("|"), ["---"] * (header.count("|") + 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


class Bench:
    """The tables, of some models over the data sets in a folder; a quick bench has a few cases and one repeat of everything."""

    def __init__(self, data: Path, models: Sequence[str], is_quick: bool) -> None:
        self.data, self.models, self.is_quick = data, models, is_quick
        self.figures = Path("runs") / "figures" if is_quick else PAGE.parent / "figures"

    def few(self, number: int, quick: int = 2) -> int:
        """How many cases or repeats there are."""
        return quick if self.is_quick else number

    def eval(self, name: str, model: str, methods: str, cases: int, *options: object) -> dict[str, Any]:
        """Measure methods on a data set's passages; the summary by method."""
        fixed = ("--data", self.data, "--chunking", "passage", "--prompt", "few-shot", "--num-chunks", SETS[name][0])
        with tempfile.TemporaryDirectory() as folder:
            out = ("--cases", self.few(cases), "--json", *(() if "--out" in options else ("--out", Path(folder) / "run")))
            words = ("eval", name, "--model", model, "--methods", f"full_recompute,{methods}", *fixed, *out, *options)
            return dict(run("-m", "cacheblend", *words)["methods"])

    def search(self, name: str, model: str, *options: object) -> dict[str, Any]:
        """Measure what is found in a data set's passages, and how it is answered."""
        return run(SEARCH, find_file(name, str(self.data)), "--model", model, "--json", *options)

    def prefill(self, model: str, *size: object) -> dict[str, Any]:
        """Time a prompt in full and blended."""
        fixed = ("--repeats", self.few(3, 1), "--ratios", 0.0, DEFAULT_RATIO)
        return run(SCRIPTS / "bench_fusor.py", "--model", model, *fixed, *size)

    def quality(self) -> str:
        """The preset, a fixed ratio and the paper's selection, given passages; then over the retriever's own chunks."""
        rows: list[Sequence[object]] = []
        answered = ("--answers", "--prompt", "few-shot", "--chunk-tokens", 512, "--way", WAYS[-1], "--cases", self.few(40))
        for model in self.models:
            for name in SETS:
                found = self.eval(name, model, ",".join(WAYS_TO_BLEND), SETS[name][1], "--ratios", DEFAULT_RATIO)
                full, ways = found["full_recompute"], [found[way] for way in WAYS_TO_BLEND]
                f1 = ", ".join(f"{one['f1']:.3f}" for one in (full, *ways))
                nll = "{mean:+.2f} ({low:+.2f} to {high:+.2f})".format(**ways[0][f"{NLL}_difference"])
                nll = ", ".join((nll, *(f"{one[NLL]:+.2f}" for one in ways[1:])))
                others = ((COMPUTE, 3), (KL, 3), ("equal_greedy_tokens", 2))
                compute, kl, equal = (", ".join(f"{one[what]:.{digits}f}" for one in ways) for what, digits in others)
                rows.append((model, "{}: {cases}, {prompt_tokens:,.0f}".format(name, **full), f1, compute, kl, nll, equal))
                found = self.search(name, model, *answered)
                own, blend, cases = found[WAYS[-1]], found[WAYS[-1]]["blend"], found["questions"]
                nll = "{:+.2f} ({:+.2f} to {:+.2f})".format(*own["nll_over_full"])
                f1 = f"{own['full_recompute']['f1']}, {blend['f1']}"
                rows.append((model, f"{name}, **own search**: {cases}", f1, "", blend[KL], nll, ""))
        return table("model|set: cases, tokens|F1: full, then the ways|compute|KL|NLL over full|equal tokens", rows)

    def ttft(self) -> str:
        """Full prefill against blends, by model and prompt length; drawn by the number and by the length of chunks."""
        rows: list[Sequence[object]] = []
        by_number: dict[int, dict[str, Any]] = {}  # of the last model
        for model in self.models:
            by_number = {chunks: self.prefill(model, "--chunks", chunks) for chunks in NUMBERS[: self.few(4, 1)]}
            for found in by_number.values():
                blends = (found["blend"][way] for way in TIMES)
                times = (f"{blend['blend_s']:.3g} s, {blend['speedup']:.1f} x" for blend in blends)
                rows.append((model, f"{found['tokens']:,}", f"{found['full_s']:.3g} s", *times))
        by_length = {tokens: self.prefill(self.models[-1], "--chunk-tokens", tokens) for tokens in LENGTHS[: self.few(4, 1)]}
        points: list[Point] = []
        for axis, measured in (("chunks of 512 tokens", by_number), ("tokens of each of 6 chunks", by_length)):
            for size, found in measured.items():
                seconds = {"full prefill": found["full_s"]} | {TIMES[way]: found["blend"][way]["blend_s"] for way in TIMES}
                points += [(axis, way, size, value) for way, value in seconds.items()]
        draw_lines(self.figures / "ttft_chunks.png", points, y="TTFT, median (s)", log_x=True, log_y=True)
        made = table("model|prompt tokens|full prefill|" + "|".join(TIMES.values()), rows)
        return f"{made}\n\n![TTFT by number and length of chunks](figures/ttft_chunks.png)"

    def load(self) -> str:
        """The picture of TTFT under requests at random moments, by a service's methods."""
        asked = ("--methods", SERVED, "--cases", self.few(40, 4), "--rates", RATES, "--data", self.data)
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), {}, self.models[-1]) as (address, _):
            drawn = ("--figure", self.figures / "ttft_load.png", "--json")
            run("-m", "cacheblend", "eval", "load", "squad_shared", "--address", address, *asked, *drawn)
        return "![TTFT by requests a second](figures/ttft_load.png)"

    def ratio(self) -> str:
        """The picture of loss and quality against compute, and of quality against TTFT."""
        picture, methods = self.figures / "loss_compute.png", f"full_reuse,high,{','.join(WAYS_TO_BLEND)}"
        with tempfile.TemporaryDirectory() as folder:
            runs = {Path(folder) / f"{name}{place}": (name, model) for place, model in enumerate(self.models) for name in DRAWN}
            for out, (name, model) in runs.items():
                self.eval(name, model, methods, 20, "--ratios", ",".join(map(str, RATIOS)), "--out", out)
            report = [sys.executable, "-m", "cacheblend", "eval", "report", *runs, "--figure", picture]
            subprocess.run(list(map(str, report)), check=True, stdout=subprocess.DEVNULL)
        return f"![KL of the first token and F1 against compute, F1 against TTFT](figures/{picture.name})"

    def ingest(self) -> str:
        """Speed of the ingest and of the store, then bytes and loss by codec."""
        model, rows = self.models[0], list[Sequence[object]]()
        job = run(SCRIPTS / "bench_ingest.py", "--model", model, "--chunks", self.few(200, 12), "--repeats", self.few(3, 1))
        store = run(SCRIPTS / "bench_store.py", "--entries", self.few(100_000, 1_000))
        speed = job["tokens"] / sorted(job["seconds"]["ingest"])[len(job["seconds"]["ingest"]) // 2]
        facts = [("ingest with embedding and index", f"{speed:,.0f} tokens/s")]
        facts.append(("precompute, over the model's own forward", job["kv_over_forward"]))
        facts.append((f"store of {store['entries']:,}: open, look-up", f"{store['open_s']} s, {store['lookup_us']} µs"))
        for codec in CODECS:
            found = self.eval("squad_shared", model, "full_reuse,blend", 40, "--kv-cache-dtype", codec)
            reuse, blend = found["full_reuse"], found["blend"]
            token_kb = reuse["loaded_bytes"] / (reuse["prompt_tokens"] - reuse["recomputed_tokens"]) / 1000
            rows.append((f"`{codec}`", f"{token_kb:.1f} kB", f"{blend[KL]:.4f}", f"{blend[NLL]:+.2f}"))
        return f"{table(f'{model}|', facts)}\n\n{table('codec|KV of a token|KL|NLL over full', rows)}"

    def retrieval(self) -> str:
        """Share of gold passages found, and of questions with all of them, by way to search."""
        rows: list[Sequence[object]] = []
        for name in SEARCHED:
            found = self.search(name, self.models[0], "--cases", self.few(300, 20))
            recalls = [f"{found[way]['recall']}, {found[way]['all']}" for way in WAYS]
            rows.append((f"{name}, {found['passages']:,}, {found['questions']}", *recalls))
        return table("set, passages, questions|meaning and words|two rounds (default)", rows)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets' files")
    parser.add_argument("--model", action="append", help=f"may be repeated (default: {', '.join(MODELS)})")
    parser.add_argument("--table", action="append", choices=TABLES, help="may be repeated; left out, all")
    parser.add_argument("--quick", action="store_true", help="a few cases of each, printed and not written")
    options = parser.parse_args()
    bench = Bench(options.data, options.model or MODELS, options.quick)
    for name in options.table or TABLES:
        made = f"Commit {(commit() or 'unknown')[:9]}.\n\n{getattr(bench, name)()}"
        print(made)
        if not options.quick:
            before, begin, page = PAGE.read_text(encoding="utf-8").partition(f"<!-- bench:{name} -->\n")
            _, end, after = page.partition(f"<!-- /bench:{name} -->")
            PAGE.write_text(f"{before}{begin}{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
