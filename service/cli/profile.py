"""`cacheblend profile`: what a model costs on this device, and the store's disk, measured once."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from cacheblend.loader.profiler import LENGTHS, RATIOS

from . import options
from .options import DEFAULTS


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
    device: options.Device = DEFAULTS["device"],
    dtype: options.Dtype = DEFAULTS["dtype"],
    chunk_tokens: options.ChunkTokens = DEFAULTS["chunk_tokens"],
    allow_unverified: options.AllowUnverified = DEFAULTS["allow_unverified"],
    as_json: options.Json = False,
) -> None:
    """Measure prefill over lengths, recompute over ratios, and each tier's throughput; the loading controller plans with it.

    It is kept beside the store and found again by model, device and version. Measure on a quiet machine.

    Examples:
        cacheblend profile ./model --store-dir ./store

        cacheblend profile ./model --length 512 --length 2048 --repeats 5 --json
    """
    options.hush_libraries()
    from cacheblend.blend import Fusor
    from cacheblend.loader.profile import profile_name
    from cacheblend.service.engine.config import DTYPES, EngineConfig
    from cacheblend.service.engine.profiles import measure_and_keep

    config = EngineConfig(
        model=model,
        store_dir=store_dir,
        device=device,
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        allow_unverified=allow_unverified,
    )
    fusor = Fusor.from_pretrained(model, config.resolve_device(), DTYPES[dtype], allow_unverified=allow_unverified)
    with options.progress_bars() as progress:
        measured = measure_and_keep(
            config,
            fusor,
            lengths=lengths or LENGTHS,
            ratios=ratios or RATIOS,
            repeats=repeats,
            on_progress=progress,
        )
    path = config.profile_dir / profile_name(measured.model, measured.device)
    if as_json:
        options.print_json({**measured.as_dict(), "file": str(path)})
        return
    table = Table("measured", "seconds")
    for sample in measured.prefill:
        table.add_row(f"full prefill of {sample.tokens:,} tokens", f"{sample.seconds:.4f}")
    for layer in measured.blend:
        ratio = f"{layer.rows:,} of {layer.tokens:,} rows" + (f", {layer.projected:,} checked" if layer.projected else "")
        table.add_row(f"layer {layer.layer} of a blend, {ratio}", f"{layer.seconds:.5f}")
    options.stdout.print(table)
    for tier, speed in measured.tiers.items():
        options.stdout.print(
            f"{tier}: {speed.bytes_per_s / 1e9:.2f} GB/s and {speed.read_s * 1e6:.0f} us a read", highlight=False
        )
    options.stdout.print(f"{measured.device}; kept in {path}", highlight=False, soft_wrap=True)
