"""Options: fields of config dataclasses, whose flags, variables, TOML keys and lines in the docs follow; checks of values."""

import math
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from .errors import ConfigError

MIB, GIB = 2**20, 2**30
T = TypeVar("T")
_KEY = "option"
VARIABLES = "CACHEBLEND_"  # the beginning of each option's variable
_SCALARS = (bool, int, float, str)


def option(default: T, help: str, *, choices: Collection[str] = (), panel: str = "", secret: bool = False) -> T:
    """A dataclass field that a user can set from outside.

    Args:
        default: the field's default.
        help: one sentence on the option's effect; units and range if the name does not say them.
        choices: the allowed values, if they can be listed.
        panel: heading of the option in help and docs; by default the config's own.
        secret: whether the config's text hides the value.
    """
    return field(default=default, repr=not secret, metadata={_KEY: (help, tuple(choices), panel)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option as users write it."""

    name: str  # of the field, and the key in a TOML file
    type: Any  # that a command line parses: a scalar, an optional scalar, or `list[str]`
    default: Any
    help: str  # with the choices
    panel: str  # heading in help and docs
    config: type  # the class of the field

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The option's name in the environment."""
        return f"{VARIABLES}{self.name.upper()}"


def options_of(*configs: type) -> dict[str, Option]:
    """The options of config classes and of the configs nested in them, by name.

    Raises:
        TypeError: two fields have one name.
    """
    found: dict[str, Option] = {}
    for each in (one for config in configs for one in _walk(config)):
        if each.name in found:
            raise TypeError(f"{each.config.__name__} and {found[each.name].config.__name__} both have an option {each.name!r}")
        found[each.name] = each
    return found


def from_options(config: type[T], values: Mapping[str, Any], base: T | None = None) -> T:
    """Make a config from flat values, or a changed copy of `base`; options of nested configs reach the nested config.

    None means the default.

    Raises:
        ConfigError: there is no such field, or a value is not allowed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    own = {each.name: given.pop(each.name) for each in fields(cast(Any, config)) if each.name in given}
    hints = get_type_hints(config)
    nested = {each.name: hints[each.name] for each in fields(cast(Any, config)) if is_dataclass(hints[each.name])}
    parts = {name: {each: given.pop(each) for each in options_of(nested[name]) if each in given} for name in nested}
    if given:
        known = {each.name for each in fields(cast(Any, config))} | options_of(config).keys()
        raise ConfigError("option", min(given), f"{config.__name__} has {', '.join(sorted(known))}")
    for name, options in parts.items():
        if options and name in own:
            raise ConfigError(name, own[name], f"not beside {', '.join(sorted(options))}, which it has")
        if options:
            own[name] = from_options(nested[name], options, None if base is None else getattr(base, name))
    return config(**own) if base is None else cast(T, replace(cast(Any, base), **own))


def _walk(config: type) -> Iterator[Option]:
    hints = get_type_hints(config)
    for each in fields(cast(Any, config)):
        if is_dataclass(hints[each.name]):
            yield from _walk(hints[each.name])
        elif _KEY in each.metadata:
            help_, choices, panel = each.metadata[_KEY]
            yield Option(
                name=each.name,
                type=_outside(hints[each.name]),
                default=None if each.default is MISSING else each.default,
                help=f"{help_} One of {', '.join(choices)}." if choices else help_,
                panel=panel or config.__name__.removesuffix("Config"),
                config=config,
            )


def _outside(hint: Any) -> Any:
    """The type that a command line parses for a field: of a union its scalars."""
    if get_origin(hint) is tuple:
        return list[str] | None
    if get_origin(hint) in (Union, types.UnionType):
        scalars = [part for part in get_args(hint) if part in _SCALARS]
        return scalars[0] | None if type(None) in get_args(hint) else scalars[0]
    return hint


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: object, *, at_least: int = 1) -> None:
    """Refuse a value that is not an integer of at least `at_least`, by `ConfigError`."""
    if not is_whole(value) or value < at_least:
        raise ConfigError(name, value, f"a whole number of at least {at_least}")


def check_share(name: str, value: object) -> None:
    """Refuse a value that is not a number from 0 to 1, by `ConfigError`."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ConfigError(name, value, "a number from 0 to 1")


def check_user_info(name: str, url: str) -> None:
    """Refuse a URL in which part of a password could be read as host or path; the message does not show it.

    Raises:
        ConfigError: an "@" stands after the host, or more than one before it.
    """
    try:
        parts = urlsplit(url)
        good = parts.netloc.count("@") <= 1 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:  # for example brackets without an address
        good = False
    if not good:
        allowed = 'one "@", before the host; percent-encode all others, and in a password also / (%2F), ? (%3F) and # (%23)'
        raise ConfigError(name, "what is given (not shown)", allowed)
