"""`cacheblend model`: known models, fetched once and found by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, terminal

if TYPE_CHECKING:
    from cacheblend.blend.models import KnownModel

app = typer.Typer(help="Fetch small pretrained models, and list them.", no_args_is_help=True)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known model; see `cacheblend model ls`.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You accept the model's terms; asked for once, where it has any.")
    ] = False,
    accept_license: Annotated[bool, typer.Option("--accept-license", hidden=True)] = False,
    as_json: options.Json = False,
) -> None:
    """Fetch a known model, check it, and convert it once; every command then accepts its name for --model, offline.

    It lies in the user's cache folder (XDG_CACHE_HOME); nothing is installed. A second time does nothing.

    Examples:
        cacheblend model get smollm2-135m && cacheblend ask -m smollm2-135m "Who signs?" --store-dir ./store

        cacheblend model get gemma3-270m --accept-licence --json
    """
    terminal.hush_libraries()
    from cacheblend.blend.models import find_model

    model = find_model(name)
    fetched = fetch(model, accept_licence=accept_licence or accept_license)
    if as_json:
        terminal.print_json({**_row(model), "already_there": not fetched})
        return
    state = "fetched" if fetched else "is there already"
    terminal.print_line(f"{name} {state}: {model.folder}")
    terminal.print_line(f"licence: {model.licence.name} ({model.licence.url})")


def fetch(model: KnownModel, *, accept_licence: bool = False) -> bool:
    """Fetch a known model unless it is there, licence and progress on stderr; False where it was there already.

    Raises:
        InputError, ModelFetchError: see `fetch_model`.
    """
    from cacheblend.blend.models import fetch_model

    if not model.is_fetched:
        size = f"{model.download_bytes / 1e6:,.0f} MB"
        terms = f"{model.licence.name} ({model.licence.url})"
        terminal.stderr.print(f"{model.name}: {size} to download; {terms}", highlight=False, soft_wrap=True)
    with terminal.progress_bars() as progress:
        return fetch_model(model, accept_licence=accept_licence, on_progress=progress)


@app.command("ls")
def ls(as_json: options.Json = False) -> None:
    """List the known models, and which of them are on this machine.

    Example: cacheblend model ls --json
    """
    from cacheblend.blend.models import KNOWN_MODELS

    rows = [_row(model) for model in KNOWN_MODELS.values()]
    if as_json:
        terminal.print_json({"models": rows})
        return
    columns = ("model", "family", "licence", "parameters", "download", "on disk")
    millions = ("parameters", "download_bytes", "bytes")
    shown = ([row["name"], row["family"], row["licence"], *(f"{row[name] / 1e6:,.0f} M" for name in millions)] for row in rows)
    terminal.print_table(columns, shown)


def _row(model: KnownModel) -> dict[str, Any]:
    fetched = model.is_fetched
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "licence": model.licence.name,
        "licence_url": model.licence.url,
        "sha256": model.gguf_sha256,
        "download_bytes": model.download_bytes,
        "fetched": fetched,
        "path": str(model.folder) if fetched else None,
        "bytes": _bytes(model.folder) if fetched else 0,
    }


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def choose_model(model: str | None, *, yes: bool) -> str:
    """Return the model that was asked for; without one the default known model, which is fetched first if the user agrees.

    Args:
        model: as `--model` names it.
        yes: the user has agreed to the download beforehand.

    Raises:
        InputError: the default model is not on this machine, and there is no terminal on which to ask for the download.
        ModelFetchError: the default model cannot be fetched.
    """
    if model is not None:
        return model
    with terminal.shown_stages():
        from cacheblend.blend.models import DEFAULT_MODEL, KNOWN_MODELS
    default = KNOWN_MODELS[DEFAULT_MODEL]
    terminal.note(f"No --model was given: using {default.name}")
    if not default.is_fetched:
        if not yes:
            terminal.confirm(
                f"{default.name} is not on this machine. Fetch it ({default.download_bytes / 1e6:,.0f} MB)?",
                f"fetch it with `cacheblend model get {default.name}`, give --yes to fetch it now, or give another model",
            )
        fetch(default)
    return default.name
