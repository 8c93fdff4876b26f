"""A whole evaluation: requests through the methods, into a folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.blend import Fusor
from cacheblend.retriever import Embedder
from cacheblend.service.engine.config import DTYPES

from .case_runner import CaseRunner
from .config import EvalConfig
from .environment import environment
from .folder import RunFolder
from .summary import summarize

Progress = Callable[[str, int, int], None]


def evaluate(
    config: EvalConfig,
    folder: Path,
    *,
    resume: bool = False,
    fusor: Fusor | None = None,
    embedder: Embedder | None = None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run an evaluation and give its summary, see `summarize`; rows and summary are in the folder as well.

    Args:
        config: what to run.
        folder: a new folder for the run; with `resume` the folder of one that was cut off.
        resume: go on behind the last whole case; the set-up must be the same.
        fusor: in place of the model that the config names.
        embedder: in place of the retriever's own.
        on_progress: called with the stage, what of it is done, and how much it is.

    Raises:
        InputError: the folder exists, or is no run to go on with; no model or data set there; a line of it is no example.
        UnsupportedModelError: the model cannot be blended.
    """
    if folder.exists() and not resume:
        raise InputError(f"{folder} exists; choose another --out, or go on with that run by --resume")
    fusor = fusor or load_fusor(config)
    limit = None if fusor.max_positions is None else fusor.max_positions - config.new_tokens
    # What is wrong with data, model or packages shows before a folder is made.
    requests = config.source.requests(fusor.tokenizer, limit, embedder, functools.partial(on_progress, "corpus"))
    first = next(requests, None)
    if first is None:
        raise InputError(f"the data set {config.source.name} holds no case")
    cases = CaseRunner(config, fusor)
    cases.warm_up(first)
    setup = {"config": config.as_dict(), **environment(fusor)}
    run = RunFolder.resume(folder, setup) if resume else RunFolder.create(folder, setup)
    done = {row["case"] for row in run.rows()}
    for index, request in enumerate(itertools.chain([first], requests)):
        if request.is_warm_up or index in done:
            cases.skip(request)
        else:
            run.append(cases.run(request, index))
        on_progress("cases", index + 1, max(index + 1, config.source.count))
    summary = summarize(run)
    run.write_summary(summary)
    return summary


def load_fusor(config: EvalConfig, **kwargs: Any) -> Fusor:
    """The model that a configuration names; `kwargs` go to transformers.

    Raises:
        InputError: no model there, or one without a tokenizer.
        UnsupportedModelError: it cannot be blended.
    """
    fusor = Fusor.from_pretrained(
        config.model, config.device, DTYPES[config.dtype], allow_unverified=config.allow_unverified, **kwargs
    )
    if fusor.tokenizer is None:
        raise InputError(f"the model at {config.model!r} has no tokenizer; save one beside it")
    return fusor
