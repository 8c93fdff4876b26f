"""`cacheblend profile`: what a model costs on this device, and the store's disk, measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.base.errors import InputError, ProfileError
from cacheblend.loader import LoaderConfig, Profile, compare_devices, load_profile
from cacheblend.loader.profiler import LENGTHS, RATIOS
from cacheblend.service.engine.config import EngineConfig, load_fusor

from . import options, terminal


@options.engine_options(only=(*options.OF_MODELS, "chunk_tokens"))
def profile(
    model: Annotated[str, typer.Argument(envvar="CACHEBLEND_MODEL", help=options.MODEL_HELP)],
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", help=f"Prompt tokens to measure; several times. Left out: {', '.join(map(str, LENGTHS))}."),
    ] = None,
    ratios: Annotated[
        list[float] | None,
        typer.Option("--ratio", help=f"Recompute ratio to measure; several times. Left out: {', '.join(map(str, RATIOS))}."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each; the median counts.")] = 3,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Measure prefill over lengths, recompute over ratios, and each tier's throughput; the loading controller plans with it.

    It is written beside the store and found again by model, device and version. Measure on a quiet machine.

    Examples:
        cacheblend profile ./model --store-dir ./store

        cacheblend profile ./model --length 512 --length 2048 --repeats 5 --json
    """
    terminal.hush_libraries()
    from cacheblend.loader import measure_profile, write_profile

    config = settings.make(EngineConfig, model=model, store_dir=store_dir)
    fusor = load_fusor(config)
    with terminal.progress_bars() as progress:
        measured = measure_profile(
            fusor,
            config.profile_dir,
            config.loader,
            chunk_tokens=config.retriever.chunk_tokens,
            lengths=lengths or None,
            ratios=ratios or RATIOS,
            repeats=repeats,
            on_progress=progress,
        )
    path = write_profile(config.profile_dir, measured)
    if as_json:
        terminal.print_json({**measured.as_dict(), "file": str(path)})
        return
    rows = [(f"full prefill of {sample.tokens:,} tokens", f"{sample.seconds:.4f}") for sample in measured.prefill]
    for layer in measured.blend:
        ratio = f"{layer.rows:,} of {layer.tokens:,} rows" + (f", {layer.projected:,} checked" if layer.projected else "")
        rows.append((f"layer {layer.layer} of a blend, {ratio}", f"{layer.seconds:.5f}"))
    terminal.print_table(("measured", "seconds"), rows)
    for tier, speed in measured.tiers.items():
        terminal.print_line(f"{tier}: {speed.bytes_per_s / 1e9:.2f} GB/s and {speed.read_s * 1e6:.0f} us a read")
    terminal.print_line(f"{measured.device}; written to {path}")


@options.engine_options(only=(*options.OF_MODELS, "chunk_tokens"))
def plan(
    model: Annotated[
        str | None,
        typer.Argument(envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP[:-1]}; its profile is beside the store."),
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="A profile file, in place of the model's own; it may be of another machine."),
    ] = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    tokens: Annotated[int, typer.Option(help="Reused tokens of a request.")] = 3072,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = LoaderConfig().quality_ratio,
    stored_tokens: Annotated[int | None, typer.Option(help="Tokens to store, for the price; left out: --tokens.")] = None,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Compare storage devices for a model's KV, at example prices, and name the cheapest that adds no delay to a request.

    Example: cacheblend profile ./model && cacheblend plan ./model --tokens 4096
    """
    if profile_file is not None:
        measured = load_profile(profile_file)
    elif model is not None:
        measured = _profile_of(settings.make(EngineConfig, model=model, store_dir=store_dir))
    else:
        raise InputError("give a model, or a profile with --profile")
    chunk_tokens = settings.values["chunk_tokens"]
    choices = compare_devices(measured, tokens=tokens, ratio=ratio, chunk_tokens=chunk_tokens, stored_tokens=stored_tokens)
    cheapest = next((choice.device for choice in choices if choice.adds_no_delay), None)
    if as_json:
        given = {"cheapest": cheapest, "tokens": tokens, "ratio": ratio, "profiled_on": measured.device}
        terminal.print_json({**given, "devices": [choice._asdict() for choice in choices]})
        return
    rows = []
    for choice in choices:
        milliseconds = [f"{seconds * 1000:,.1f} ms" for seconds in (choice.load_layer_s, choice.prefill_s, choice.delay_s)]
        note = "cheapest without delay" if choice.device == cheapest else "no delay" if choice.adds_no_delay else ""
        rows.append((choice.device, f"{choice.price_per_month:,.4g}", *milliseconds, note))
    terminal.print_table(("device", "price a month", "load a layer", "TTFT", "delay", ""), rows)
    terminal.print_line(f"{tokens:,} reused tokens at ratio {ratio}, measured on {measured.device}")
    if tokens > 2 * (longest := max(sample.tokens for sample in measured.prefill)):
        warning = f"no prefill of over {longest:,} tokens was measured: `cacheblend profile --length {tokens}` measures it"
        terminal.stdout.print(warning, style="yellow", highlight=False)
    if cheapest is None:
        terminal.print_line("no device is fast enough to add no delay at this ratio")


def _profile_of(config: EngineConfig) -> Profile:
    from cacheblend.service.engine.profiles import find_profile

    found = find_profile(config, load_fusor(config))
    if found is None:
        raise ProfileError(
            f"there is no profile of {config.model} on this device in {config.profile_dir}; "
            f"run `cacheblend profile {config.model}` first"
        )
    return found
