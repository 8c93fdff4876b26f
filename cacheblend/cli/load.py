"""`cacheblend eval load`: TTFT and throughput of servers under requests at random moments."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.eval.data import DATA_SETS, DATA_VARIABLE, PRESETS, FileSource, RequestSource, WorldSource
from cacheblend.eval.load.sweep import LoadConfig

from . import options, terminal

if TYPE_CHECKING:
    from cacheblend.eval.load.sweep import Progress
    from cacheblend.eval.load.target import LoadRequest, Target

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(LoadConfig)}
MARGIN_TOKENS = 128  # a server's own separators and template stand around what is measured here
INTERRUPTED = 130  # what shells give for Ctrl-C
PEERS = "Servers"


@options.engine_options(only=("device", "dtype"))
def load(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", envvar="CACHEBLEND_MODEL", help="Of the service that is started; left out, the packaged reader."
        ),
    ] = None,
    rates: Annotated[str, typer.Option(help="Comma-separated arrivals a second.")] = "0.5,1,2,4",
    requests: Annotated[int, typer.Option(help="Requests of each rate.")] = DEFAULTS["requests"],
    methods: Annotated[
        str, typer.Option(help="Comma-separated methods of our own service; the first target is the reference.")
    ] = "full_recompute,prefix_cache,blend",
    recompute_ratio: Annotated[float | None, typer.Option(help="0..1, of blend; left out, the service picks it.")] = None,
    name: Annotated[str, typer.Option("--data-set", help=f"world, or one of {', '.join(DATA_SETS)}.")] = "world",
    data: Annotated[str | None, typer.Option(envvar=DATA_VARIABLE, help="The set's file, or a folder that has it.")] = None,
    preset: Annotated[str, typer.Option(help=f"Set-up of a data set: {' or '.join(PRESETS)}.")] = "extended",
    cases: Annotated[
        int | None, typer.Option(help="Cases from the file's start, which make up the corpus; left out, the whole data set.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the cases, or their order, and the arrivals.")] = DEFAULTS["seed"],
    warm_up: Annotated[
        int, typer.Option(help="Requests before, not measured, where the data set has none for that.")
    ] = DEFAULTS["warm_up"],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = DEFAULTS["max_tokens"],
    timeout_s: Annotated[float, typer.Option(help="A request without a byte for so long has failed.")] = DEFAULTS["timeout_s"],
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of another OpenAI-compatible server, without /v1; repeat for more.", rich_help_panel=PEERS),
    ] = None,
    peer_completions: Annotated[
        bool, typer.Option("--peer-completions", help="Peers' models have no chat template.", rich_help_panel=PEERS)
    ] = False,
    peer_api_key: Annotated[
        str | None, typer.Option(envvar="CACHEBLEND_PEER_API_KEY", help="Sent to the peers.", rich_help_panel=PEERS)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="URL of a running `cacheblend serve`; left out, one is started.", rich_help_panel=PEERS),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="CACHEBLEND_API_KEY", help="Sent to our own service.", rich_help_panel=PEERS)
    ] = None,
    serve_config: Annotated[
        Path | None, typer.Option(help="TOML file of the service that is started.", rich_help_panel=PEERS)
    ] = None,
    store_dir: Annotated[
        Path | None,
        typer.Option(help="Store of the service that is started; left out, an empty one for this run.", rich_help_panel=PEERS),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New folder for the run; left out, one below runs/.")] = None,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Sweep arrival rates over methods and servers: TTFT, throughput, hit rates, and throughput at equal median TTFT.

    Examples:
        cacheblend eval load --rates 1,2,4,8 --requests 100 --json

        cacheblend eval load -m ./model --data-set 2wikimqa_shared --data ./data --rates 0.2,0.5,1

        cacheblend eval load --address http://127.0.0.1:8000 --peer vllm=http://127.0.0.1:8001
    """
    terminal.hush_libraries()
    from cacheblend.eval.load.report import load_report
    from cacheblend.eval.load.sweep import run_load

    from .model import default_model

    model = default_model() if model is None else model
    swept = tuple(options.numbers("rates", rates))
    if name == "world" and cases is None:
        cases = max(1, warm_up + requests * len(swept))  # as many as are asked for; a corpus is more than that
    source = _source(name, data, preset, seed, cases)
    config = LoadConfig(
        source=source,
        rates_rps=swept,
        requests=requests,
        warm_up=warm_up,
        max_tokens=max_tokens,
        timeout_s=timeout_s,
        seed=seed,
    )
    peers = [_named(text) for text in peer or ()]
    wanted = options.listed(methods)
    if not wanted and not peers:
        raise ConfigError("methods", methods, "at least one, or a --peer")
    folder = out or Path("runs") / f"load-{source.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with ExitStack() as running, terminal.progress_bars() as progress:
        first, by_rate = _requests(config, model, progress)
        chunk_tokens = max(request.chunk_tokens for group in (first, *by_rate) for request in group)
        targets: list[Target] = []
        if wanted:
            own = address or running.enter_context(_service(model, serve_config, store_dir, settings, chunk_tokens))
            targets += _own(own, wanted, source, recompute_ratio, api_key)
        targets += _peers(peers, source, peer_completions, peer_api_key)
        summary = run_load(config, targets, first, by_rate, folder, on_progress=progress)
    if as_json:
        terminal.print_json(summary)
    else:
        typer.echo(load_report(summary), nl=False)
    if summary["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _source(name: str, data: str | None, preset: str, seed: int, cases: int | None) -> RequestSource:
    if name == "world":
        return WorldSource(seed=seed) if cases is None else WorldSource(seed=seed, cases=cases)
    if preset not in PRESETS:
        raise ConfigError("preset", preset, f"one of {', '.join(PRESETS)}")
    return FileSource(name=name, data=data, cases=cases, seed=seed, preset=PRESETS[preset])


def _requests(config: LoadConfig, model: str, on_progress: Progress) -> tuple[list[LoadRequest], list[list[LoadRequest]]]:
    """Those that warm up, and those of every rate."""
    from cacheblend.eval.load.target import load_requests, split_requests

    tokenizer, positions = _tokenizer(model)
    limit = None if positions is None else max(1, positions - config.max_tokens - MARGIN_TOKENS)
    requests = load_requests(config.source, tokenizer, limit, on_corpus=functools.partial(on_progress, "corpus"))
    return split_requests(requests, config.warm_up, len(config.rates_rps), config.requests)


def _tokenizer(model: str) -> tuple[Any, int | None]:
    """The tokenizer, and how many positions the model has; without its weights."""
    from transformers import AutoConfig

    from cacheblend.blend.models import load_tokenizer, locate_model

    tokenizer = load_tokenizer(model)
    try:
        config = AutoConfig.from_pretrained(locate_model(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no model at {model!r} ({error}); give --model a directory, a GGUF file, a hub id or a known name"
        ) from error
    if tokenizer is None:
        raise InputError(f"the model at {model!r} has no tokenizer; save one beside it")
    return tokenizer, getattr(config, "max_position_embeddings", None)


@contextmanager
def _service(
    model: str, config: Path | None, store_dir: Path | None, settings: options.Settings, chunk_tokens: int
) -> Iterator[str]:
    from cacheblend.eval.load.own_server import own_server

    with tempfile.TemporaryDirectory(prefix="cacheblend-load-store-") as empty:
        given = {
            "--model": model,
            "--store-dir": store_dir or empty,
            "--device": settings.values["device"],
            "--dtype": settings.values["dtype"],
            "--chunk-tokens": chunk_tokens,
            "--guard-share": 0,  # a check would have a later request wait
        }
        serve = [str(word) for pair in given.items() for word in pair]
        with own_server([*serve, *([] if config is None else ["--config", str(config)])]) as server:
            yield server.address


def _own(
    address: str, methods: Sequence[str], source: RequestSource, recompute_ratio: float | None, api_key: str | None
) -> list[Target]:
    from cacheblend.eval.load.target import own_targets

    run = f"{time.time_ns():x}"
    return own_targets(address.rstrip("/"), methods, source, run=run, recompute_ratio=recompute_ratio, api_key=api_key)


def _peers(peers: Sequence[tuple[str, str]], source: RequestSource, completions: bool, api_key: str | None) -> list[Target]:
    from cacheblend.eval.load.target import peer_target

    return [peer_target(label, address, source.wording, completions=completions, api_key=api_key) for label, address in peers]


def _named(text: str) -> tuple[str, str]:
    label, equals, address = text.partition("=")
    if not equals or not label or not address.startswith(("http://", "https://")):
        raise ConfigError("peer", text, "NAME=URL, such as vllm=http://127.0.0.1:8001")
    return label, address.rstrip("/").removesuffix("/v1")
