"""`cacheblend calibrate`: context, selector and ratio for a model on a user's documents, stored beside the store's profiles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cacheblend.base.files import make_folder
from cacheblend.cli import options, terminal
from cacheblend.eval.data import DocumentsSource, Preset
from cacheblend.eval.data.source import SEARCHED_CHUNKS
from cacheblend.eval.method_plan import CONTEXTS, METHOD_OF_SELECTOR, listed, numbers
from cacheblend.eval.run.calibration import Thresholds
from cacheblend.loader import write_calibration
from cacheblend.service.engine.config import EngineConfig

if TYPE_CHECKING:
    from cacheblend.eval.run.calibration import CalibrationRun


@options.accepts(EngineConfig, only=(*options.OF_MODELS, "chunk_tokens", "kv_cache_dtype"))
def calibrate(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder or file of documents, as for `cacheblend ingest`.")],
    questions: Annotated[
        str | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help='.jsonl, a line {"question", "answers" if there are any}, or .txt; left out, made from the documents.',
        ),
    ] = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    cases: Annotated[int, typer.Option(help="Questions, from the file's start, or made from that many chunks.")] = 16,
    max_kl: Annotated[float, typer.Option(help="Highest mean first-token KL from full recompute, nats.")] = Thresholds().max_kl,
    max_nll: Annotated[
        float, typer.Option(help="Highest mean NLL of the right answers above full recompute's, nats.")
    ] = Thresholds().max_nll,
    num_chunks: Annotated[int, typer.Option(help="Chunks of a prompt.")] = SEARCHED_CHUNKS,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the run; left out, one below runs/, named by time.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help=f"Comma-separated: what chunks' KV is computed after, of {', '.join(CONTEXTS)}.")
    ] = "default,filler",
    selectors: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(METHOD_OF_SELECTOR)}.")
    ] = "question_attention,gradual,first_tokens",
    ratios: Annotated[str, typer.Option(help="Comma-separated recompute ratios, 0..1.")] = "0,0.05,0.1,0.15,0.2,0.3,0.5",
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Measure what blending loses on your documents, and store the cheapest setting within a loss; the service starts with it.

    Examples:

        cacheblend calibrate ./model ./handbook --store-dir ./my-store
        cacheblend calibrate ./model ./handbook --questions questions.jsonl
    """
    terminal.hush_libraries()

    from cacheblend.eval.run.calibration import calibrate as run_calibration
    from cacheblend.eval.run.calibration import calibration_config
    from cacheblend.eval.run.runner import load_fusor

    engine = settings.make(EngineConfig, model=options.check_path(model), store_dir=store_dir)
    source = DocumentsSource(
        documents=folder,
        questions=questions,
        cases=cases,
        preset=Preset(chunk_tokens=engine.retriever.chunk_tokens, num_chunks=num_chunks),
        worked_examples=False,
    )
    chosen = listed(selectors)
    config = calibration_config(
        source,
        engine.model,
        contexts=listed(contexts),
        selectors=chosen,
        ratios=numbers("ratios", ratios),
        device=str(engine.resolve_device()),
        dtype=engine.dtype,
        kv_cache_dtype=engine.kv_cache_dtype,
        allow_unverified=engine.allow_unverified,
    )
    run_folder = out or Path("runs") / f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}"
    make_folder(engine.profile_dir)  # a folder that cannot be written shows before the measuring
    fusor = load_fusor(config)
    with terminal.progress_bars() as progress:
        thresholds = Thresholds(max_kl=max_kl, max_nll=max_nll)
        run = run_calibration(config, thresholds, run_folder, fusor, selectors=chosen, on_progress=progress)
    path = write_calibration(engine.profile_dir, run.calibration) if run.is_within else None
    if as_json:
        terminal.print_json(_as_json(run, path))
    else:
        _print(run, path)


def _as_json(run: CalibrationRun, path: Path | None) -> dict[str, object]:
    chosen = run.calibration.as_dict()
    return {
        "chosen": {name: chosen[name] for name in ("context", "selector", "ratio")} | chosen["measures"],
        "is_within": run.is_within,
        "thresholds": chosen["thresholds"],
        "full_recompute": {"ttft_s_median": run.full_ttft_s_median},
        "curves": [setting.as_dict() for setting in run.curves],
        "path": None if path is None else str(path),
        "run": str(run.folder),
    }


def _print(run: CalibrationRun, path: Path | None) -> None:
    # Without a frame the table fits on 80 columns.
    table = Table("context", "selector", "ratio", "KL", "at most", "NLL", "equal", "compute", "TTFT s", box=None)
    for setting in run.curves:
        found = setting.measures
        high, nll_nats = found.first_token_kl_high_nats, found.gold_nll_over_full_nats
        table.add_row(
            setting.context,
            setting.selector or "-",
            f"{setting.ratio:g}",
            f"{found.first_token_kl_nats:.3f}",
            "" if high is None else f"{high:.3f}",
            "" if nll_nats is None else f"{nll_nats:+.3f}",
            f"{found.equal_greedy_tokens:.2f}",
            f"{found.compute_share:.3f}",
            f"{found.ttft_s_median:.3f}",
        )
    terminal.stdout.print(table)
    chosen, found, thresholds = run.calibration, run.chosen.measures, run.thresholds
    high = found.first_token_kl_high_nats
    said = [
        "KL: of the first token, nats, and the upper end of its 95 % interval; NLL: of right answers, nats over full "
        "recompute's; equal: share of equal greedy tokens; compute: share of full recompute's",
        f"{found.cases} questions; full recompute's first token after {run.full_ttft_s_median:.3f} s",
        f"{'least KL' if path is None else 'chosen'}: context {chosen.context}, selector {chosen.selector}, "
        f"ratio {chosen.ratio:g}: KL {found.first_token_kl_nats:.3f} nats"
        + ("" if high is None else f" (at most {high:.3f} with 95 %)"),
        f"{'nothing is stored' if path is None else f'stored in {path}'}; the run is in {run.folder}",
    ]
    if path is None:
        remedy = "ask more questions, or accept more by --max-kl and --max-nll"
        said.insert(2, f"no setting is within KL {thresholds.max_kl:g} and NLL {thresholds.max_nll:g}; {remedy}")
    for line in said:
        terminal.print_line(line)
