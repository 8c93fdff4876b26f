"""`cacheblend eval`: quality and TTFT of the methods on a data set, reports and figures."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option, options_of
from cacheblend.blend import DEFAULT_RATIO
from cacheblend.cli import options, terminal
from cacheblend.cli.model import DEFAULT, choose_model
from cacheblend.eval.cli_load import load
from cacheblend.eval.data import (
    CHUNKINGS,
    DATA_SETS,
    DATA_VARIABLE,
    ORDERS,
    PRESETS,
    PROMPTS,
    DocumentsSource,
    FileSource,
    Preset,
)
from cacheblend.eval.method_plan import CONTEXTS, METHODS, listed, numbers, plan_methods
from cacheblend.service.engine.config import EngineConfig

if TYPE_CHECKING:
    from cacheblend.eval.data import RequestSource


class _DataSetGroup(TyperGroup):
    """Names the known data sets where an unknown one is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a data set."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            raise ConfigError("data set", cmd_name, f"one of {', '.join(DATA_SETS)}; or documents, load, report")
        return command


app = typer.Typer(
    cls=_DataSetGroup,
    help="Measure quality and TTFT of the methods side by side on a data set; report what was measured.",
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Options of every command that measures methods."""

    methods: str = option(",".join(METHODS[:4]), f"Comma-separated, of {', '.join(METHODS)}.")
    ratios: str = option(str(DEFAULT_RATIO), "Comma-separated recompute ratios, 0..1, of the methods that take one.")
    contexts: str = option(CONTEXTS[0], f"Comma-separated: what stored KV was computed after, of {', '.join(CONTEXTS)}.")
    resume: bool = option(False, "Go on with the run in --out after its last complete case.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """Options that change a preset's prompts, beside `--chunk-tokens`."""

    num_chunks: int | None = option(None, "Chunks of a prompt; left out, 6 where they are searched, else all that fit.")
    order: str = option(ORDERS[0], "Of a prompt's chunks; gold-middle: the one with the answer in the middle.", choices=ORDERS)
    prompt: str = option(
        PROMPTS[0],
        "The model's chat template, or a plain text with worked examples; auto is the template where there is one.",
        choices=PROMPTS,
    )


def _changed(preset: Preset, settings: options.Settings, **others: str | None) -> Preset:
    """A preset with the options that were given, and with others that are no None."""
    given = {**others, **{name: settings.values[name] for name in ("chunk_tokens", *options_of(PromptConfig))}}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


_ENGINE = (*options.OF_MODELS, "chunk_tokens", "max_tokens", "kv_cache_dtype")
_OPTIONS = options.accepts(EngineConfig, RunConfig, PromptConfig, only=(*options_of(RunConfig, PromptConfig), *_ENGINE))


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP[:-1]}; left out, the default known model."
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="New folder for the run; left out, one below runs/, named by data and time.")
]


@_OPTIONS
def data_set(
    context: typer.Context,
    model: Model = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", envvar=DATA_VARIABLE, help="The set's .jsonl or .jsonl.gz, a folder that has it, or a hub data set."
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Set-up: {' or '.join(PRESETS)}.")] = "paper",
    seed: Annotated[int, typer.Option("--seed", help="Draws the order of the cases with --preset extended.")] = 0,
    cases: Annotated[int | None, typer.Option(help="Cases from the file's start; left out, as many as the paper's.")] = None,
    chunking: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(CHUNKINGS)}: split passages, or take each as a chunk, in the file's order, without a search; "
            "left out, as the data set is."
        ),
    ] = None,
    out: Out = None,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Measure the methods on this data set. Without --max-tokens an answer is as long as the data set says.

    Examples:

        cacheblend eval musique --data ./data --json
        cacheblend eval 2wikimqa_shared --data ./data --preset extended
        cacheblend eval squad_shared --data ./data --chunking passage
    """
    if preset not in PRESETS:
        raise ConfigError("preset", preset, f"one of {', '.join(PRESETS)}")
    setting = _changed(PRESETS[preset], settings, chunking=chunking)
    source = FileSource(name=str(context.info_name), data=data, cases=cases, seed=seed, preset=setting)
    _run(source, model, out, settings, as_json=as_json)


for _name, _set in DATA_SETS.items():
    app.command(_name, short_help=f"{_set.file}, from {_set.source}.")(data_set)


@app.command("documents")
@_OPTIONS
def documents(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder or file of documents, as for `cacheblend ingest`.")],
    questions: Annotated[
        str,
        typer.Option(
            "--questions",
            metavar="FILE",
            help='.jsonl, a line {"question", "answers" and "id" if there are any}, or .txt, a question a line.',
        ),
    ],
    model: Model = None,
    cases: Annotated[int | None, typer.Option(help="Questions from the file's start; left out, all.")] = None,
    out: Out = None,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Measure the methods on your own documents and questions; right answers are not needed.

    Examples:

        cacheblend eval documents ./handbook --questions questions.txt
        cacheblend eval documents ./docs --questions q.txt --methods blend,epic
    """
    source = DocumentsSource(documents=folder, questions=questions, cases=cases, preset=_changed(Preset(), settings))
    _run(source, model, out, settings, as_json=as_json)


app.command("load")(load)


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Also draw KL and quality against compute and TTFT, a column a run, as FILE.png, with FILE.csv beside."
        ),
    ] = None,
) -> None:
    """Print runs as Markdown tables, and several side by side.

    Examples:

        cacheblend eval report runs/musique-* > results.md
        cacheblend eval report runs/musique --figure loss.png
    """
    from cacheblend.eval.run.folder import RunFolder
    from cacheblend.eval.run.report import draw_losses
    from cacheblend.eval.run.report import report as make_report

    if figure is not None and figure.suffix != ".png":
        raise ConfigError("figure", str(figure), "a .png")
    typer.echo(make_report(runs), nl=False)
    if figure is not None:
        draw_losses(figure.parent, figure.stem, [RunFolder(run) for run in runs])


def _run(source: RequestSource, model: str | None, out: Path | None, settings: options.Settings, *, as_json: bool) -> None:
    run = settings.make(RunConfig)
    if run.resume and out is None:
        raise ConfigError("resume", run.resume, "only with --out, the folder of the run to go on with")
    engine = settings.make(EngineConfig, model=model or DEFAULT, store_dir=".")
    methods, ratios, contexts = tuple(listed(run.methods)), tuple(numbers("ratios", run.ratios)), tuple(listed(run.contexts))
    plan_methods(methods, ratios, contexts)  # before libraries load
    chosen = choose_model(model, yes=False)
    terminal.hush_libraries()
    from cacheblend.eval.run.folder import EvalConfig
    from cacheblend.eval.run.report import report
    from cacheblend.eval.run.runner import evaluate

    config = EvalConfig(
        source=source,
        model=chosen,
        methods=methods,
        ratios=ratios,
        contexts=contexts,
        max_new_tokens=engine.max_tokens,
        kv_cache_dtype=engine.kv_cache_dtype,
        device=str(engine.resolve_device()),
        dtype=engine.dtype,
        allow_unverified=engine.allow_unverified,
    )
    folder = out or Path(f"runs/{source.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with terminal.progress_bars() as progress:
        summary = evaluate(config, folder, resume=run.resume, on_progress=progress)
    if as_json:
        terminal.print_json(summary)
    else:
        typer.echo(report([folder]), nl=False)
