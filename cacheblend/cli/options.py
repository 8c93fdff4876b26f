"""Options of commands, made from the fields of the config dataclasses; and the few that are no field."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from cacheblend.base.errors import InputError
from cacheblend.base.files import user_data_folder
from cacheblend.base.options import Option, from_options, options_of
from cacheblend.service.engine.config import remembered_settings

T = TypeVar("T")
MODEL_HELP = "Model directory, GGUF file, hub id, or known name (cacheblend model ls)."
# Options of an engine that have an effect on a command that looks at a model, and options of a store for its remote tier.
OF_MODELS = ("device", "dtype", "allow_unverified")
MAY_BE_FILES = {"context_filler", "embedder"}
OF_REMOTES = ("remote", "remote_secret", "remote_tenant", "remote_timeout_s")
DEFAULT_STORE_DIR = user_data_folder() / "store"


def _apply_settings(context: typer.Context, store_dir: Path) -> Path:
    """Make the settings of the store the defaults, so that flags, variables and a config file win over them."""
    store_dir = Path(os.path.expanduser(store_dir))
    if str(store_dir).startswith("~"):
        raise InputError(f"there is no home folder for {store_dir}; name another folder with --store-dir")
    context.default_map = {**remembered_settings(store_dir), **(context.default_map or {})}
    return store_dir


def check_path(model: str) -> str:
    """The model, its `~` expanded; raises InputError if it is written as a path or a file's name where there is none."""
    written = model.startswith(("/", ".", "~")) or model.endswith((".gguf", ".json"))
    if written and not os.path.exists(os.path.expanduser(model)):
        raise InputError(f"no model at {model!r}: give the path of a model, a hub id, or a known name (cacheblend model ls)")
    return os.path.expanduser(model) if written else model


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="CACHEBLEND_MODEL",
        help=f"{MODEL_HELP[:-1]}; left out, the store's, else the default known model.",
    ),
]
Fetch = Annotated[bool, typer.Option("--yes", "-y", help="Fetch the default model without asking, where it is not here yet.")]
StoreDir = Annotated[
    Path,
    typer.Option(
        "--store-dir",
        "-s",
        envvar="CACHEBLEND_STORE_DIR",
        help="Folder of the chunk KV and the index.",
        callback=_apply_settings,
        is_eager=True,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; progress and logs on stderr.")]


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the options that `accepts` made for a command, by name; an option that was left out has its default."""

    values: Mapping[str, Any]

    def make(self, config: type[T], **fixed: Any) -> T:
        """Make a config of the values that it has; `fixed` come first. Raises ConfigError for a value that is not allowed."""
        known = options_of(config)
        given = {name: self.values[name] for name in known.keys() & self.values.keys()}
        named = [name for name in MAY_BE_FILES & given.keys() if given[name] not in (known[name].default, "none")]
        files = {name: os.path.expanduser(given[name]) for name in named}
        absolute = {name: os.path.abspath(file) for name, file in files.items() if os.path.exists(file)}  # a store keeps them
        return from_options(config, {**given, **absolute, **fixed})


def accepts(
    *configs: type, only: Collection[str] | None = None, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of config classes, nested ones too, in place of its parameter `settings: Settings`.

    These are all, or `only` those that have an effect on the command, `without` those that have none; `defaults` differ here.
    """
    found = options_of(*configs)
    names = [name for name in (found if only is None else only) if name not in without]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints, signature = get_type_hints(command, include_extras=True), inspect.signature(command)
        own = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values() if each.name != "settings"]
        parameters = [*own, *(_parameter(found[name], defaults.get(name, found[name].default)) for name in names)]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            return command(**given, settings=Settings(values | lists))

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # which inspect reads
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        )
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(option: Option, default: Any) -> inspect.Parameter:
    """An option as typer reads it."""
    parser = size if option.name.endswith("_bytes") else None
    flags = f"{option.flag}/--no-{option.flag[2:]}" if default is True else option.flag
    flag = typer.Option(flags, envvar=option.variable, help=option.help, rich_help_panel=option.panel, parser=parser)
    kind, default = inspect.Parameter.KEYWORD_ONLY, None if default == () else default
    return inspect.Parameter(option.name, kind, default=default, annotation=Annotated[option.type, flag])


def size(given: str | int) -> int:
    """Read a number of bytes, such as 2GB, 512MiB or 1000; raises BadParameter for what is none."""
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?) ?([kmgt]?)(i?)b?", str(given).lower(), re.ASCII)
    if found is None:
        raise typer.BadParameter(f"{given!r} is no number of bytes; give one such as 2GB, 512MiB or 1000")
    return int(Decimal(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))
