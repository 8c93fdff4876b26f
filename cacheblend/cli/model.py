"""`cacheblend model`, `profile` and `plan`: known models, what a model costs on this device, and which storage is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.loader.config import LENGTHS, LoaderConfig
from cacheblend.service.engine.config import EngineConfig, load_fusor

from . import options, terminal

if TYPE_CHECKING:
    from cacheblend.blend import KVGeometry
    from cacheblend.blend.models import KnownModel

COMMON_MODELS = Path(__file__).with_name("common_models.json")  # names, and what their config.json says of sizes
DEFAULT = "default"  # stands for the known model that is chosen where none is named
PLANNED_CODECS = ("raw", "int8", "int4")
PLANNED_TOKENS = 5_000_000  # 10,000 pages of 500
app = typer.Typer(help="Fetch small pretrained models, and list them.", no_args_is_help=True)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known model; see `cacheblend model ls`.")],
    accept_licence: Annotated[
        bool,
        typer.Option(
            "--accept-licence", "--accept-license", help="You accept the model's terms; asked for once, where it has any."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Fetch a known model, check it, and convert it once; every command then accepts its name for --model, offline.

    It lies in the user's cache folder (XDG_CACHE_HOME); nothing is installed. A second time does nothing.

    Examples:

        cacheblend model get smollm2-135m
        cacheblend model get gemma3-270m --accept-licence --json
    """
    terminal.hush_libraries()
    from cacheblend.blend.models import find_model

    model = find_model(name)
    fetched = _fetch(model, accept_licence=accept_licence)
    state = f"{name} {'fetched' if fetched else 'is there already'}: {model.folder}"
    licence = f"licence: {model.licence.name} ({model.licence.url})"
    terminal.print_result({**_row(model), "already_there": not fetched}, f"{state}\n{licence}", as_json)


def _fetch(model: KnownModel, *, accept_licence: bool = False) -> bool:
    """`fetch_model` with licence and progress on stderr; False where the model was there already."""
    from cacheblend.blend.gguf_file import conversion_price
    from cacheblend.blend.models import fetch_model

    if not model.is_fetched:
        terms = f"{model.licence.name} ({model.licence.url})"
        price = conversion_price(model.parameters, model.stored_dtype or "bfloat16")
        terminal.note(f"{model.name}: {model.download_bytes / 1e6:,.0f} MB to download; {price}; {terms}")
    with terminal.progress_bars() as progress:
        return fetch_model(model, accept_licence=accept_licence, on_progress=progress)


@app.command("ls")
def ls(as_json: options.Json = False) -> None:
    """List the known models, and which of them are on this machine.

    Examples:

        cacheblend model ls --json
    """
    from cacheblend.blend.models import KNOWN_MODELS

    rows = [_row(model) for model in KNOWN_MODELS.values()]
    if as_json:
        terminal.print_json({"models": rows})
        return
    millions = ("parameters", "download_bytes", "bytes")
    shown = ([row["name"], row["family"], row["licence"], *(f"{row[name] / 1e6:,.0f} M" for name in millions)] for row in rows)
    terminal.print_table(("model", "family", "licence", "parameters", "download", "on disk"), shown)


def _row(model: KnownModel) -> dict[str, Any]:
    fetched = model.is_fetched
    return {
        **{name: getattr(model, name) for name in ("name", "family", "parameters", "download_bytes")},
        "licence": model.licence.name,
        "licence_url": model.licence.url,
        "sha256": model.gguf_sha256,
        "fetched": fetched,
        "path": str(model.folder) if fetched else None,
        "bytes": sum(file.stat().st_size for file in model.folder.iterdir()) if fetched else 0,
    }


def choose_model(model: str | None, *, yes: bool, default_name: str | None = None) -> str:
    """The model that was asked for, or a known one, which is fetched first if the user agrees or has agreed (`yes`).

    The known one is the default of all commands where none is named.

    Raises:
        InputError: the default model is not on this machine, and there is no terminal on which to ask for the download.
        ModelFetchError: the default model cannot be fetched.
    """
    if model is not None:
        return options.check_path(model)
    with terminal.shown_stages():
        from cacheblend.blend.models import DEFAULT_MODEL, KNOWN_MODELS
    default = KNOWN_MODELS[default_name or DEFAULT_MODEL]
    terminal.note(f"No model was given: using {default.name}")
    if not default.is_fetched:
        if not yes:
            terminal.confirm(
                f"{default.name} is not on this machine. Fetch it ({default.download_bytes / 1e6:,.0f} MB)?",
                f"fetch it with `cacheblend model get {default.name}`, give --yes to fetch it now, or give another model",
            )
        _fetch(default)
    return default.name


@options.accepts(EngineConfig, only=(*options.OF_MODELS, "chunk_tokens"))
def profile(
    model: Annotated[str, typer.Argument(envvar="CACHEBLEND_MODEL", help=options.MODEL_HELP)],
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", help=f"Prompt tokens to measure; several times. Left out: {', '.join(map(str, LENGTHS))}."),
    ] = None,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Measure prefill over lengths, recompute over ratios, and each tier's throughput; the loading controller plans with it.

    It is written beside the store and found again by model, device and version. Measure on a quiet machine.

    Examples:

        cacheblend profile ./model --store-dir ./my-store
        cacheblend profile ./model --length 512 --length 2048 --json
    """
    config = settings.make(EngineConfig, model=options.check_path(model), store_dir=store_dir)
    terminal.hush_libraries()
    from cacheblend.loader import measure_profile, write_profile

    fusor = load_fusor(config)
    with terminal.progress_bars() as progress:
        measured = measure_profile(
            fusor,
            config.profile_dir,
            config.loader,
            chunk_tokens=config.retriever.chunk_tokens,
            lengths=lengths or None,
            on_progress=progress,
        )
    path = write_profile(config.profile_dir, measured)
    if as_json:
        terminal.print_json({**measured.as_dict(), "file": str(path)})
        return
    for tier, speed in measured.tiers.items():
        terminal.print_line(f"{tier}: {speed.bytes_per_s / 1e9:.2f} GB/s and {speed.read_s * 1e6:.0f} us a read")
    terminal.print_line(f"{measured.device}; written to {path}, from which `cacheblend plan {path}` compares storage devices")


def stored_token_bytes(geometry: KVGeometry, codec: str, tokens: int) -> float:
    """Bytes of a token's KV in chunks of so many tokens."""
    from cacheblend.store.codecs import CODECS, LayerShape

    shapes = (LayerShape(heads, tokens, size, geometry.dtype) for heads, size in map(geometry.heads, range(geometry.layers)))
    return sum(CODECS[codec].encoded_shape(shape).nbytes for shape in shapes) / tokens


def plan(
    what: Annotated[
        str | None, typer.Argument(metavar="MODEL|PROFILE", help="A model, a config.json, or a file of `cacheblend profile`.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Reused tokens of a request.")] = 3072,
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Recompute ratio.")] = LoaderConfig().quality_ratio,
    as_json: options.Json = False,
) -> None:
    """Show memory, disk and KV of a model, of which only the config is read; without a model, of ten common ones.

    Of a profile: compare storage devices for the KV of 10,000 pages, at example prices, and name the cheapest that adds no
    delay to a request. The options are for this.

    Examples:

        cacheblend plan
        cacheblend plan ./model
        cacheblend plan config.json
        cacheblend plan ./my-store/profiles/PROFILE.json --tokens 4096
    """
    if what is not None and options.check_path(what).endswith(".json") and Path(what).name != "config.json":
        _plan_storage(Path(what), tokens, ratio, as_json=as_json)
        return
    terminal.hush_libraries()
    from transformers import AutoConfig

    from cacheblend.blend.loading import read_config

    if what is None:
        rows = [_sizes(name, AutoConfig.for_model(**own)) for name, own in json.loads(COMMON_MODELS.read_text()).items()]
    else:
        config = read_config(what)
        rows = [_sizes(config.model_type, config)]
    if as_json:
        terminal.print_json({"models": rows})
        return
    shown = []
    for row in rows:
        kv_kb, billions = [row[codec] / 1e3 for codec in PLANNED_CODECS], row["weights"] / 1e9
        pages_gb = f"{kv_kb[0] * PLANNED_TOKENS / 1e6:,.0f}"
        shown.append((row["name"], f"{billions:,.1f} B", f"{2 * billions:,.0f}", *(f"{size:.1f}" for size in kv_kb), pages_gb))
    terminal.print_table(("model", "weights", "GB", *PLANNED_CODECS, "10,000 pages"), shown)
    terminal.print_line("GB: of 16-bit weights; raw, int8, int4: kB of KV a token; pages: GB of raw KV, 500 tokens a page")


def _sizes(name: str, config: Any) -> dict[str, Any]:
    """A model's weights, and bytes of KV a token by codec; 0 where it is served exactly."""
    import torch

    from cacheblend.blend.loading import count_weights, kv_geometry

    (weights, exact_reason), kv = count_weights(config), dict.fromkeys(PLANNED_CODECS, 0)
    if exact_reason is None:
        geometry = kv_geometry(config, torch.device("cpu"), torch.bfloat16)
        kv = {codec: round(stored_token_bytes(geometry, codec, 512)) for codec in PLANNED_CODECS}
    return {"name": name, "weights": weights, **kv, "exact_reason": exact_reason}


def _plan_storage(file: Path, tokens: int, ratio: float, *, as_json: bool) -> None:
    from cacheblend.loader import compare_devices, load_profile

    measured = load_profile(file)
    choices = compare_devices(measured, tokens=tokens, ratio=ratio, stored_tokens=PLANNED_TOKENS)
    cheapest = next((choice.device for choice in choices if choice.adds_no_delay), None)
    if as_json:
        given = {"cheapest": cheapest, "tokens": tokens, "ratio": ratio, "profiled_on": measured.device}
        terminal.print_json({**given, "devices": [choice._asdict() for choice in choices]})
        return
    rows = []
    for choice in choices:
        milliseconds = [f"{seconds * 1000:,.1f} ms" for seconds in (choice.load_layer_s, choice.prefill_s, choice.delay_s)]
        remark = "cheapest without delay" if choice.device == cheapest else "no delay" if choice.adds_no_delay else ""
        rows.append((choice.device, f"{choice.price_per_month:,.4g}", *milliseconds, remark))
    terminal.print_table(("device", "price a month", "load a layer", "TTFT", "delay", ""), rows)
    terminal.print_line(f"{tokens:,} reused tokens at ratio {ratio}, 10,000 pages stored, measured on {measured.device}")
    if tokens > 2 * (longest := max(sample.tokens for sample in measured.prefill)):
        terminal.note(f"no prefill of over {longest:,} tokens was measured: `cacheblend profile --length {tokens}` measures it")
    if cheapest is None:
        terminal.print_line("no device is fast enough to add no delay at this ratio")
