"""Options of commands, made from the fields of the config dataclasses; and the few that are no field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from cacheblend.base.errors import ConfigError
from cacheblend.base.files import user_data_folder
from cacheblend.base.options import from_options, options_of
from cacheblend.service.engine.config import EngineConfig, remembered_settings

T = TypeVar("T")
MODEL_HELP = "Model directory, GGUF file, hub id, or known name (cacheblend model ls)."
# What a command that looks at a model takes of an engine's options.
OF_MODELS = ("device", "dtype", "allow_unverified")
OF_REMOTES = ("remote", "remote_secret", "remote_secret_file", "remote_tenant", "remote_timeout_s", "remote_ttl_s")

Model = Annotated[str, typer.Option("--model", "-m", envvar="CACHEBLEND_MODEL", help=MODEL_HELP)]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="CACHEBLEND_MODEL",
        help=f"{MODEL_HELP[:-1]}; left out, the store's, else the default known model.",
    ),
]
Fetch = Annotated[bool, typer.Option("--yes", "-y", help="Fetch the default model without asking, where it is not here yet.")]
DEFAULT_STORE_DIR = user_data_folder() / "store"


def _apply_settings(context: typer.Context, store_dir: Path) -> Path:
    """Make the settings of the store the defaults, so that flags, variables and a config file win over them."""
    context.default_map = {**remembered_settings(store_dir), **(context.default_map or {})}
    return store_dir


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


class OptionGroup:
    """Base of dataclasses whose fields are options that several commands have, `Annotated` as typer wants them.

    A command that `accepts` decorates has them in place of its parameter of the class.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that a command was given, of those that `accepts` made for it.

    Args:
        values: by name; what was left out has its default.
    """

    values: Mapping[str, Any]

    def make(self, config: type[T], **fixed: Any) -> T:
        """A config of the values that it has; `fixed` are fields of its own, or options that come first.

        Raises:
            ConfigError: a value is not allowed.
        """
        known = options_of(config)
        given = {name: value for name, value in self.values.items() if name in known}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return from_options(config, given | fixed)


def accepts(
    *configs: type, only: Collection[str] | None = None, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of config classes, in place of its parameter `settings: Settings`, and those of its groups.

    Args:
        configs: nested ones included.
        only: names of those that have an effect on the command; left out, all.
        without: names of those that have none.
        defaults: of options that differ here.
    """
    found = options_of(*configs)
    names = [name for name in (found if only is None else only) if name not in without]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, type[OptionGroup]] = {}
        for parameter in inspect.signature(command).parameters.values():
            hint = hints[parameter.name]
            if isinstance(hint, type) and issubclass(hint, OptionGroup):
                groups[parameter.name] = hint
                parameters += _parameters_of(hint)
                continue
            if parameter.name != "settings":
                parameters.append(parameter.replace(annotation=hints[parameter.name]))
                continue
            for each in (found[name] for name in names):
                flag = typer.Option(each.flag, envvar=each.variable, help=each.help, rich_help_panel=each.panel)
                default = defaults.get(each.name, each.default or None if each.type == list[str] | None else each.default)
                parameters.append(
                    inspect.Parameter(
                        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[each.type, flag]
                    )
                )

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            given["settings"] = Settings({name: given.pop(name) for name in names})
            for name, group in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})  # type: ignore[arg-type]
            return command(**given)

        keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # which inspect reads
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameters_of(group: type[OptionGroup]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)  # type: ignore[arg-type]  # they are dataclasses
    ]


def engine_options(
    *, without: Collection[str] = (), only: Collection[str] | None = None, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`accepts` of an engine's options."""
    return accepts(EngineConfig, only=only, without=without, **defaults)


def listed(text: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str) -> list[float]:
    """The numbers of a comma-separated option; raises ConfigError where one is none."""
    try:
        return [float(part) for part in listed(text)]
    except ValueError as error:
        raise ConfigError(name, text, "numbers, separated by commas") from error
