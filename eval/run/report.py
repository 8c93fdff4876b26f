"""Runs as Markdown: a table a run, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .folder import RunFolder
from .summary import ALL, REFERENCE, summarize


def report(folders: Sequence[Path]) -> str:
    """Markdown tables of the runs, also of one that is not complete; with several, one more that compares them.

    Raises:
        InputError: a folder is no run, or has no whole case.
    """
    summaries = [summarize(RunFolder(folder)) for folder in folders]
    parts = [_run(summary) for summary in summaries]
    if len(summaries) > 1:
        parts.append(_comparison(summaries))
    return "\n\n".join(parts) + "\n"


def _run(summary: dict[str, Any]) -> str:
    lines = [
        f"## {summary['run']}",
        "",
        f"{summary['data_set']}, {summary['cases']} cases ({summary['cases_cut']} cut to the model's context), model "
        f"{summary['model']}, {summary['device']}, {summary['threads']} threads.",
    ]
    if "quality" in summary:
        lines.append(f"Quality is left out: {summary['quality']}.")
    methods, metric = summary["methods"], metric_of(summary)
    lines += ["", *_table(_HEADER if metric is None else [*_HEADER, metric, "difference (95 %)"], _rows(methods, metric))]
    classes = [name for name in next(iter(methods.values())) if name != ALL]
    if classes and metric is not None:
        by_class = [
            [label, *(_number(of_class[name][metric]) for name in (*classes, ALL))] for label, of_class in methods.items()
        ]
        lines += ["", *_table([f"{metric} by class", *classes, ALL], by_class)]
    return "\n".join(lines)


_HEADER = [
    "method",
    "TTFT median s",
    "p95 s",
    "sooner",
    "tokens recomputed",
    "compute",
    "MB loaded",
    "deviation left",
    "KL nats (95 %)",
    "NLL over full (95 %)",
    "equal tokens",
]


def _rows(methods: dict[str, Any], metric: str | None) -> Iterable[list[str]]:
    full_s = methods[REFERENCE][ALL]["ttft_s_median"] if REFERENCE in methods else None
    for label, of_class in methods.items():
        all_ = of_class[ALL]
        row = [
            label,
            _number(all_["ttft_s_median"], 4),
            _number(all_["ttft_s_p95"], 4),
            "" if full_s is None else f"{full_s / all_['ttft_s_median']:.2f} x",
            f"{all_['recomputed_tokens']:,.0f} of {all_['prompt_tokens']:,.0f}",
            _number(all_["compute_share"]),
            _number(all_["loaded_bytes"] / 1e6, 1),
            _number(all_["deviation_left"], 4),
            _with_interval(all_, "first_token_kl_nats"),
            _with_interval(all_, "gold_nll_over_full_nats", sign="+"),
            _number(all_["equal_greedy_tokens"], 2),
        ]
        if metric is not None:
            row += [_number(all_[metric]), _difference(all_.get(f"{metric}_difference"))]
        yield row


def _comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """Methods of several runs side by side, each with its quality and TTFT over all cases."""
    labels = list(dict.fromkeys(label for summary in summaries for label in summary["methods"]))
    rows = []
    for label in labels:
        row = [label]
        for summary in summaries:
            found, metric = summary["methods"].get(label, {}).get(ALL), metric_of(summary)
            row.append("" if found is None else f"{_number(found['ttft_s_median'], 4)} s")
            row.append("" if found is None or metric is None else f"{_number(found[metric])} {metric}")
        rows.append(row)
    header = ["method"]
    for summary in summaries:
        name = Path(summary["run"]).name
        header += [f"{name}: TTFT", f"{name}: quality"]
    return "\n".join(["## Side by side", "", *_table(header, rows)])


def metric_of(summary: dict[str, Any]) -> str | None:
    """The metric that a run's methods are compared by; None where its quality is withheld."""
    found = next(iter(summary["methods"].values()))[ALL]
    return next((metric for metric in ("f1", "rouge_l") if found.get(metric) is not None), None)


def _difference(found: dict[str, float | None] | None) -> str:
    if found is None:
        return ""
    mean, low, high = found["mean"], found["low"], found["high"]
    interval = "" if low is None or high is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{mean:+.3f}{interval}"


def _with_interval(found: dict[str, Any], name: str, sign: str = "") -> str:
    """A metric that is 0 for full recompute, with the interval of its difference from that."""
    if found[name] is None:
        return ""
    difference = found.get(f"{name}_difference") or {}
    low, high = difference.get("low"), difference.get("high")
    interval = "" if low is None or high is None else f" ({low:{sign}.3f} to {high:{sign}.3f})"
    return f"{found[name]:{sign}.3f}{interval}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
