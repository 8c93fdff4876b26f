"""Measure figures of the CacheBlend paper on a model, and draw each as fig_N.png with its points in fig_N.csv.

    python scripts/paper_figures.py 2 12 16 --model DIR --data DIR          # answers: runs of `cacheblend eval`
    python scripts/paper_figures.py 6 7 8 --model DIR --data DIR --cases 2  # KV and attention against full prefill
    python scripts/paper_figures.py 17 --model DIR                          # slow disks, by `bench_fusor.py --bandwidths`

 2  quality against the number of chunks          6  attention deviation against the recomputed share, by selector
12  quality against TTFT, all methods             7  distribution of the KV deviation over the tokens of a layer
16  quality and loss against the recompute ratio  8  rank correlation of the KV deviation between neighbouring layers
17  TTFT against the bandwidth of the disk

Questions are HotpotQA's, each passage a chunk, few-shot. A run stays in --runs and is not measured again: 12 and 16 share one
with the last point of 2, and a run that was cut off goes on. Figures 14 and 15 are `bench_all.py --table load` and
`--table ttft`. Figure 13 is not measured: the evaluation has no MapReduce and no MapRerank. The last line is a JSON object.
"""

import argparse
import itertools
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench_all import run

from cacheblend.blend import DEFAULT_RATIO, FusionConfig, FusionResult, Fusor
from cacheblend.blend.fidelity import kept_pairs
from cacheblend.blend.fusion import kv_deviation
from cacheblend.blend.generation import branch_cache
from cacheblend.blend.selectors import ExplicitPositions
from cacheblend.eval.data import FileSource, Preset
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.eval.methods import ResidentRequest, StoredContexts
from cacheblend.eval.run.folder import SUMMARY, EvalConfig, RunFolder
from cacheblend.eval.run.report import Point, draw_lines, summarize
from cacheblend.eval.run.runner import evaluate, load_fusor

DATA_SET, PASSAGES = "hotpotqa", 10
NUMBERS = (2, 5, PASSAGES)  # of chunks, in figure 2
METHODS = ("full_recompute", "full_reuse", "balanced")
WITH_RATIO = ("blend", "blend_hkvd")
RATIOS = (0.05, 0.14, 0.3)
NEW_TOKENS = 12  # answers are asked for in five words
QUALITY = {"f1": "F1", "gold_nll_nats": "NLL of the right answer (nats)"}
CONTEXTS = {"bos": "KV after the first token (the paper's)", "default": "KV after other text (the default)"}
SHARES = (0.05, 0.1, 0.2, 0.4)  # of figure 6
SELECTORS = {
    "KV deviation, filtered layer by layer (the paper's)": "gradual",
    "the question's attention (the default)": "question_attention",
}
BANDWIDTHS, DISK_RATIOS = (0.05, 0.2, 1.0, 5.0), {0.0: "full reuse", 0.14: "blend at 0.14"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: its points, and the names of its axes; panels whose y axes differ are named by their titles."""

    points: Sequence[Point]
    x: str
    y: str = ""
    log_x: bool = False
    log_y: bool = False


Series = dict[tuple[str, str, float], list[float]]  # by panel, line and x: y of each case


@dataclass(kw_only=True)
class Measure:
    """Measures figures of a model; what several figures need is measured once.

    Args:
        model: directory, GGUF file or known name.
        data: folder of the data set's file; figure 17 needs none.
        runs: folder where runs stay.
        cases: questions, or repeats of a timing; None for the figure's own number.
    """

    model: str
    data: str | None
    runs: Path
    cases: int | None
    _compared: dict[int, Series] = field(default_factory=lambda: defaultdict(dict))

    def chunks(self) -> Picture:
        """Figure 2."""
        found = {number: self._answers(number)["methods"] for number in NUMBERS}
        places = itertools.product(QUALITY.items(), METHODS, NUMBERS)
        points = [(title, method, number, found[number][method][metric]) for (metric, title), method, number in places]
        return Picture(points, "passages in the prompt")

    def times(self) -> Picture:
        """Figure 12."""
        found, points = self._answers(PASSAGES)["methods"], list[Point]()
        for metric, title in QUALITY.items():
            shown = {label: one for label, one in found.items() if label.partition("@")[2] in ("", "0.14")}
            points += [(title, label, one["ttft_s_median"], one[metric]) for label, one in shown.items()]
        return Picture(points, "TTFT, median (s)", log_x=True)

    def ratios(self) -> Picture:
        """Figure 16; ratio 0 is full reuse, and 1 full recompute."""
        found, points = self._answers(PASSAGES)["methods"], list[Point]()
        for metric, title in {**QUALITY, "first_token_kl_nats": "KL of the first token (nats)"}.items():
            for method in WITH_RATIO:
                ends = {0.0: "full_reuse", **{ratio: f"{method}@{ratio}" for ratio in RATIOS}, 1.0: "full_recompute"}
                points += [(title, method, ratio, found[label][metric]) for ratio, label in ends.items()]
        return Picture(points, "recompute ratio")

    def disks(self) -> Picture:
        """Figure 17."""
        sizes = ("--chunks", 4, "--repeats", self.cases or 3, "--threads", torch.get_num_threads())
        speeds = ("--ratios", *DISK_RATIOS, "--bandwidths", *BANDWIDTHS)
        found = run(Path(__file__).with_name("bench_fusor.py"), "--model", self.model, *sizes, *speeds)
        title = f"{found['tokens']:,} tokens"
        points: list[Point] = [(title, "full recompute", gb_s, found["full_s"]) for gb_s in BANDWIDTHS]
        for row in found["loading"]:
            points.append((title, DISK_RATIOS[row["ratio"]], row["gb_s"], row["ttft_s"]))
            if row["ratio"]:
                points.append((title, "loading, by itself", row["gb_s"], row["load_s"]))
        return Picture(points, "bandwidth of the disk (GB/s)", "TTFT, median (s)", log_x=True, log_y=True)

    def attention(self) -> Picture:
        """Figure 6."""
        return Picture(self._means(6), "share of the tokens that is recomputed", "attention deviation, relative")

    def distribution(self) -> Picture:
        """Figure 7."""
        return Picture(self._means(7), "percentile of the tokens", "KV deviation over a token's mean KV")

    def correlation(self) -> Picture:
        """Figure 8."""
        return Picture(self._means(8), "layer, beside the one before it", "Spearman's correlation of the KV deviation")

    def _source(self, cases: int, number: int) -> FileSource:
        preset = Preset(chunking="passage", prompt="few-shot", num_chunks=number)
        return FileSource(name=DATA_SET, data=self.data, cases=cases, preset=preset)

    def _config(self, cases: int, number: int) -> EvalConfig:
        more = ("prefix_cache", *WITH_RATIO) if number == PASSAGES else ()
        return EvalConfig(
            source=self._source(cases, number),
            model=self.model,
            methods=(*METHODS, *more),
            ratios=RATIOS if more else (DEFAULT_RATIO,),
            max_new_tokens=NEW_TOKENS,
        )

    @cached_property
    def _fusor(self) -> Fusor:
        return load_fusor(self._config(1, 1))

    def _answers(self, number: int) -> dict[str, Any]:
        """The summary of a run over prompts of a number of passages: measured, gone on with, or read."""
        config = self._config(self.cases or 6, number)
        name = re.sub("-[0-9a-f]{16}$", "", Path(self.model).name)
        folder = self.runs / f"{name}-{number}-passages-{config.source.count}-cases"
        if not (folder / SUMMARY).exists():
            evaluate(config, folder, resume=folder.exists(), fusor=self._fusor, on_progress=_say)
        return summarize(RunFolder(folder))

    def _means(self, figure: int) -> list[Point]:
        """Means over cases of what is compared with full prefill; measured once for figures 6 to 8."""
        if not self._compared:
            fusor, source = self._fusor, self._source(self.cases or 2, PASSAGES)
            contexts = StoredContexts(fusor, prompt_renderer(fusor.tokenizer, source.wording).prefix)
            for number, request in enumerate(source.requests(fusor.tokenizer, fusor.max_positions), start=1):
                resident = ResidentRequest(fusor, request, contexts, (True,) * len(request.prompt.chunks), 1)
                Case(fusor, resident).compare(self._compared)
                _say("case", number, source.count)
        return [(*place, fmean(values)) for place, values in self._compared[figure].items()]


class Case:
    """A prompt in full, and what its blends differ in.

    Args:
        fusor: the model.
        resident: the prompt, with each chunk's KV.
    """

    def __init__(self, fusor: Fusor, resident: ResidentRequest) -> None:
        self._fusor, self._resident, prompt = fusor, resident, resident.prompt
        self._full = fusor.prefill(prompt.token_ids)
        self._full_attention = self._attention(self._full)
        self._chunk_tokens = torch.arange(len(prompt.prefix), len(prompt) - len(prompt.suffix))

    def compare(self, found: dict[int, Series]) -> None:
        """Add the case to figures 6 to 8, for each context."""
        for context, panel in CONTEXTS.items():
            reuse = self._blend(context, 0.0)
            deviation_LC = self._kv_deviation(reuse)
            layers = len(deviation_LC) + 1  # layer 0's stored KV is exact, and left out
            for layer in (1, layers // 2, layers - 1):
                percentiles = torch.quantile(deviation_LC[layer - 1], torch.linspace(0, 1, 101)).tolist()
                _add(found[7], panel, f"layer {layer}", enumerate(percentiles))
            ranks_LC = deviation_LC.argsort(dim=1).argsort(dim=1).float()
            _add(found[8], "", panel, enumerate(torch.corrcoef(ranks_LC).diagonal(1).tolist(), start=2))
            orders = {
                "highest KV deviation, if it were known": deviation_LC.mean(0).argsort(descending=True),
                "random tokens": torch.randperm(deviation_LC.shape[1], generator=torch.Generator().manual_seed(0)),
            }
            at_reuse = self._attention_deviation(reuse)
            for name in (*orders, *SELECTORS):
                points = [(0.0, at_reuse)]
                for share in SHARES:
                    selector: Any = SELECTORS.get(name)
                    if name in orders:
                        chosen = self._chunk_tokens[orders[name][: round(share * len(orders[name]))]]
                        selector = ExplicitPositions([chosen.sort().values] * layers)
                    points.append((share, self._attention_deviation(self._blend(context, share, selector))))
                _add(found[6], panel, name, points)

    def _blend(self, context: str, ratio: float, selector: Any = None) -> FusionResult:
        config = FusionConfig(recompute_ratio=ratio, selector=selector)
        return self._fusor.fuse(self._resident.blend_segments(context), config)

    def _kv_deviation(self, fused: FusionResult) -> torch.Tensor:
        """KV deviation (L - 1, C) of each chunk token, over the mean size of a token's KV in its layer; without layer 0."""
        rows, zero = list[torch.Tensor](), torch.zeros(())
        for own, exact in list(kept_pairs(fused.cache, self._full.cache))[1:]:
            size_N = kv_deviation(exact.keys, exact.values, zero, zero).sqrt()
            rows.append(kv_deviation(exact.keys, exact.values, own.keys, own.values).sqrt() / size_N.mean())
        return torch.stack(rows)[:, self._chunk_tokens]

    @torch.no_grad()
    def _attention(self, fused: FusionResult) -> list[torch.Tensor]:
        """The attention (Q, S, N) of the question's tokens in each layer over a prompt's KV: the paper's forward attention.

        The question runs again, which changes nothing: its own KV follows from that of the tokens before it.
        """
        cache, model, suffix = branch_cache(fused.cache), self._fusor.model, self._resident.prompt.suffix
        cache.crop(-len(suffix))
        own = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            output: Any = model(torch.tensor([suffix]), past_key_values=cache, output_attentions=True, logits_to_keep=1)
        finally:
            model.set_attn_implementation(own)
        return [weights[0].float() for weights in output.attentions]

    def _attention_deviation(self, fused: FusionResult) -> float:
        """The norm of the attention's difference from full prefill's over the norm of full prefill's, in the mean of layers."""
        pairs = zip(self._attention(fused), self._full_attention, strict=True)
        return fmean(float((x - y).norm() / y.norm()) for x, y in pairs)


def _add(series: Series, panel: str, line: str, points: Iterable[tuple[float, float]]) -> None:
    for x, y in points:
        series.setdefault((panel, line, x), []).append(y)


def _say(stage: str, done: int, of: int) -> None:
    print(f"{stage} {done} of {of}", file=sys.stderr, flush=True)


FIGURES: dict[int, Callable[[Measure], Picture]] = {
    2: Measure.chunks,
    6: Measure.attention,
    7: Measure.distribution,
    8: Measure.correlation,
    12: Measure.times,
    16: Measure.ratios,
    17: Measure.disks,
}


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=int, nargs="+", choices=FIGURES, metavar="FIGURE", help=", ".join(map(str, FIGURES)))
    parser.add_argument("--model", required=True, help="directory, GGUF file or known name")
    parser.add_argument("--data", help=f"folder of the file of {DATA_SET}, see docs/evaluation.md")
    parser.add_argument("--cases", type=int, help="left out, 6 for answers, 2 for figures 6 to 8, 3 repeats of a timing")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="folder where runs stay")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    measure = Measure(model=options.model, data=options.data, runs=options.runs, cases=options.cases)
    written: dict[str, float] = {}
    for figure in options.figures:
        began = time.perf_counter()
        picture = FIGURES[figure](measure)
        png = options.out / f"fig_{figure}.png"
        draw_lines(png, **asdict(picture))
        written[str(png)] = round(time.perf_counter() - began, 1)
    print(json.dumps({"seconds": written}))


if __name__ == "__main__":
    main()
