"""Trains the reader, the small language model that CacheBlend ships: from nothing, or on from where a run stopped.

PYTHONPATH=scripts python -m train_reader runs/reader
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from cacheblend.base.errors import CacheBlendError, InputError
from cacheblend.eval.world.tokens import make_tokenizer

from .checkpoint import export_reader, load_checkpoint, load_reader, save_checkpoint
from .curriculum import STAGES, Stage, draw_batch
from .lesson import Batch
from .network import NetworkConfig
from .trainer import TrainConfig, Trainer
from .validation import Tally, examine

_CONFIG, _NETWORK = TrainConfig(), NetworkConfig()
# Options that a resumed run takes from its checkpoint, and those that it may change.
_FIXED = {"seed", "width", "mlp_width", "layers", "heads"}
_CHANGEABLE = {"steps", "contexts", "matrix_rate", "vector_rate"}

app = typer.Typer(name="train_reader", add_completion=False, rich_markup_mode="markdown")
console = Console(stderr=True)


@app.command(
    epilog="""**Examples**

`train_reader runs/reader` trains with the defaults; hours on two cores, and checkpoints all along.

`train_reader runs/reader --resume` goes on where that run stopped, bit for bit.

`train_reader runs/reader --resume --steps 40000` goes on, with a longer schedule.

`train_reader runs/more --start-from service/reader --stage long` trains the shipped reader further.

`train_reader runs/gpu --device cuda --contexts 128 --workers 14` fills a GPU.
"""
)
def main(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder of the run: checkpoint, log.jsonl and, at the end, reader/.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint, with its settings.")] = False,
    start_from: Annotated[
        Path | None, typer.Option(help="Start a new run from an exported reader's weights, at --stage, in place of nothing.")
    ] = None,
    stage: Annotated[str, typer.Option(help="Stage of the curriculum that --start-from begins with.")] = STAGES[-1].name,
    seed: Annotated[int, typer.Option(help="Seed of weights and lessons.")] = _CONFIG.seed,
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = _CONFIG.steps,
    contexts: Annotated[int, typer.Option(help="Lessons a step.")] = _CONFIG.contexts,
    matrix_rate: Annotated[float, typer.Option(help="Peak learning rate of Muon.")] = _CONFIG.matrix_rate,
    vector_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = _CONFIG.vector_rate,
    width: Annotated[int, typer.Option(help="Hidden size.")] = _NETWORK.width,
    mlp_width: Annotated[int, typer.Option(help="Inner size of the MLP.")] = _NETWORK.mlp_width,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = _NETWORK.layers,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _NETWORK.heads,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of the training step.")] = torch.get_num_threads(),
    workers: Annotated[int, typer.Option(help="Processes that write lessons; 0 writes them between steps.")] = 0,
    log_every: Annotated[int, typer.Option(help="Steps a log line.")] = 50,
    save_every: Annotated[int, typer.Option(help="Steps a checkpoint.")] = 200,
    exam_every: Annotated[int, typer.Option(help="Steps an exam on validation names.")] = 1000,
    stop_after_s: Annotated[float, typer.Option(help="Stop, with a checkpoint, after so many seconds; 0 for never.")] = 0.0,
) -> None:
    """Trains the reader into a folder; Ctrl-C and SIGTERM stop it with a checkpoint.

    A log line (log.jsonl) holds losses and, per question class, the accuracy beside what guessing by relation would get; an
    exam line holds the same on validation names, read in full and with each chunk's KV reused as it is.
    """
    torch.set_num_threads(threads)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    try:
        if resume:
            given = {name for name in context.params if _is_given(context, name)}
            if fixed := sorted(given & _FIXED):
                raise InputError(f"a resumed run keeps its {', '.join(fixed)}: leave these options out, or start a new run")
            trainer = load_checkpoint(out / "checkpoint", where, **{name: context.params[name] for name in given & _CHANGEABLE})
        else:
            if out.exists() and any(out.iterdir()):
                raise InputError(f"{out} is not empty: give a new folder, or --resume to go on with the run in it")
            config = TrainConfig(seed=seed, steps=steps, contexts=contexts, matrix_rate=matrix_rate, vector_rate=vector_rate)
            network = NetworkConfig(width=width, mlp_width=mlp_width, layers=layers, heads=heads)
            trainer = Trainer(config, network, where)
            if start_from is not None:
                trainer.start_from(load_reader(start_from), stage)
    except CacheBlendError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from error
    out.mkdir(parents=True, exist_ok=True)
    _run(trainer, out, workers, log_every, save_every, exam_every, stop_after_s)


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line; typer may bring its own copy of click, so its enum is compared by name."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _run(
    trainer: Trainer, out: Path, workers: int, log_every: int, save_every: int, exam_every: int, stop_after_s: float
) -> None:
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))
    began = time.monotonic()
    tally = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (out / "log.jsonl").open("a") as log, Progress(*columns, console=console) as progress, Lessons(workers) as lessons:
        bar = progress.add_task("training", total=trainer.config.steps, completed=trainer.step)
        while trainer.step < trainer.config.steps and not stopped:
            stage = trainer.stage_of_step(trainer.step + 1)
            report = trainer.train(lessons.batch(trainer, stage), stage)
            tally.add(report.answer_loss, report.context_loss, report.marks)
            progress.update(bar, completed=trainer.step, description=f"{report.stage} loss {report.answer_loss:.2f}")
            late = bool(stop_after_s) and time.monotonic() - began > stop_after_s
            if trainer.step % log_every == 0:
                _write(log, {"step": trainer.step, "stage": report.stage, "seconds": time.monotonic() - began, **tally.line()})
                tally = Tally()
            if trainer.step % exam_every == 0:
                _write(log, {"step": trainer.step, "exam": examine(trainer.network, trainer.tokenizer, trainer.device)})
            if trainer.step % save_every == 0 or late:
                save_checkpoint(trainer, out / "checkpoint")
            if late:
                break
    save_checkpoint(trainer, out / "checkpoint")
    export_reader(trainer.network, trainer.tokenizer, out / "reader")
    print(json.dumps({"step": trainer.step, "stage": STAGES[trainer.stage].name, "reader": str(out / "reader")}))


class Lessons:
    """Batches of lessons, written ahead by other processes where there are any; the same batches either way."""

    def __init__(self, workers: int) -> None:
        self._pool = ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) if workers else None
        self._ahead = 2 * workers
        self._written: dict[tuple[int, str], Future[Batch]] = {}

    def __enter__(self) -> Lessons:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def batch(self, trainer: Trainer, stage: Stage) -> Batch:
        """The batch of the trainer's next step."""
        config, step = trainer.config, trainer.step + 1
        if self._pool is None:
            return _write_batch(stage, config.seed, step, config.contexts)
        for ahead in range(step, min(step + self._ahead, config.steps) + 1):
            wanted = trainer.stage_of_step(ahead)
            if (ahead, wanted.name) not in self._written:
                self._written[ahead, wanted.name] = self._pool.submit(_write_batch, wanted, config.seed, ahead, config.contexts)
        batch = self._written.pop((step, stage.name)).result()
        for late in [key for key in self._written if key[0] <= step]:
            self._written.pop(late).cancel()
        return batch


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def _write_batch(stage: Stage, seed: int, step: int, contexts: int) -> Batch:
    return draw_batch(_tokenizer(), stage, seed=f"{seed}/{step}", contexts=contexts)


def _write(log: TextIO, line: dict[str, object]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


if __name__ == "__main__":
    app()
