"""The screen of `cacheblend demo`: the handbook's questions, each as soon as it is answered, and at the end the summary."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .handbook_demo import AskedQuestion, MethodSummary

SHOWN_METHODS = ("full_recompute", "blend")  # of each question; the summary has all
STYLES = {"full_recompute": "red", "full_reuse": "yellow", "blend": "green"}
BAR_WIDTH = 40
CLASSES_FROM = 20  # questions, from which shares of single classes say something


def page_note(store_dir: Path | None) -> str:
    """Tell how to open the page over a demo's store, or how to keep the store for it."""
    if store_dir is None:
        return "The store was removed; with --store-dir DIR it stays, and the page can be opened over it."
    program = "cacheblend" if shutil.which("cacheblend") else shlex.quote(str(Path(sys.executable).with_name("cacheblend")))
    command = f"{program} serve --store-dir {shlex.quote(str(store_dir))}"
    return f"Open the page: {command}, then http://127.0.0.1:8000/ in a browser"


class DemoScreen:
    """Prints the demo as it goes on; on a terminal with colours, bars, and lines that end at its border.

    Args:
        console: where to.
        questions: how many will be asked.
    """

    def __init__(self, console: Console, questions: int) -> None:
        self._console, self._questions = console, questions

    def begin(self, model: str, documents: int) -> None:
        """Say what is about to be seen."""
        self._line(
            f"{model} reads a handbook of {documents} chapters once, and the KV of its chunks is stored. Then it answers "
            f"{self._questions} questions: full recompute reads the found chunks anew, blend loads their KV from the store."
        )

    def ingested(self, line: str) -> None:
        """Say what the ingest did."""
        self._line(line)

    def asked(self, each: AskedQuestion, number: int) -> None:
        """Show the `number`-th question, its answers, and their times to the first token."""
        item, full_s = each.question, each.replies["full_recompute"].ttft_s
        slowest_s = max(each.replies[method].ttft_s for method in SHOWN_METHODS)
        self._line(f"\n{number} of {self._questions}  {item.question}  ({item.answers[0]})", style="bold")
        for method in SHOWN_METHODS:
            reply = each.replies[method]
            mark = ("right", "green") if reply.has_answer else ("wrong", "red")
            self._line(Text.assemble(f"  {_name(method):<15}", (f"{mark[0]:<6}", mark[1]), reply.text))
        for method in SHOWN_METHODS:
            reply = each.replies[method]
            speedup = "" if method == "full_recompute" else f"{full_s / reply.ttft_s:.1f} x"
            self._line(self._timed(method, reply.ttft_s, slowest_s, speedup))

    def medians(self, asked: Sequence[AskedQuestion], methods: Mapping[str, MethodSummary]) -> None:
        """Show every method's median time to the first token."""
        prompt_tokens = sum(each.prompt_tokens for each in asked) / len(asked)
        self._line(f"\nTime to first token, median of {len(asked)} prompts of about {prompt_tokens:,.0f} tokens:", style="bold")
        slowest_s = max(row.ttft_s_median for row in methods.values())
        for method, row in methods.items():
            self._line(self._timed(method, row.ttft_s_median, slowest_s, f"{row.speedup:.1f} x"))

    def end(
        self, asked: Sequence[AskedQuestion], methods: Mapping[str, MethodSummary], note: str, store_dir: Path | None = None
    ) -> None:
        """Show the medians, the means, what they say, and how to open the page over a store that stays."""
        self.medians(asked, methods)
        self._line("")
        self._console.print(_means(methods, with_classes=len(asked) >= CLASSES_FROM))
        self._line(note)
        self._line(f"\n{page_note(store_dir)}", style="bold")

    def _timed(self, method: str, ttft_s: float, slowest_s: float, speedup: str) -> Text:
        bar = ("█" * max(1, round(ttft_s / slowest_s * BAR_WIDTH))).ljust(BAR_WIDTH) if self._console.is_terminal else ""
        return Text.assemble(f"  {_name(method):<15}", (bar, STYLES[method]), f"{ttft_s * 1000:>6,.0f} ms", f"  {speedup}")

    def _line(self, line: str | Text, style: str = "") -> None:
        is_cut = isinstance(line, Text) and self._console.is_terminal
        self._console.print(
            line,
            style=style,
            highlight=False,
            no_wrap=is_cut,
            overflow="ellipsis" if is_cut else None,
            soft_wrap=not self._console.is_terminal,
        )


def _name(method: str) -> str:
    return method.replace("_", " ")


def _means(methods: Mapping[str, MethodSummary], *, with_classes: bool) -> Table:
    table = Table("means over all questions")
    for method in methods:
        table.add_column(_name(method), justify="right")
    rows = list(methods.values())
    table.add_row("answers that hold a right one", *(f"{row.answer_share:.0%}" for row in rows))
    for name in rows[0].answer_share_by_class if with_classes else ():
        table.add_row(f"  {name}", *(f"{row.answer_share_by_class[name]:.0%}" for row in rows))
    table.add_row("F1", *(f"{row.f1:.2f}" for row in rows))
    table.add_row("first-token KL, nats", *(f"{row.first_token_kl_nats:.3f}" for row in rows))
    table.add_row("gold NLL over full, nats", *(f"{row.gold_nll_over_full_nats:+.2f}" for row in rows))
    table.add_row("equal greedy tokens", *(f"{row.equal_greedy_tokens:.0%}" for row in rows))
    table.add_row("recomputed share", *(f"{row.recomputed_share:.0%}" for row in rows))
    return table
