"""Options made from the fields of config dataclasses."""

from dataclasses import dataclass, field

import pytest

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import from_options, option, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = option(3, "Size.")
    names: tuple[str, ...] = option((), "Names.")
    hidden: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    place: str
    speed: float | None = option(None, "Speed.", choices=("1", "2"), panel="Motion")
    inner: Inner = field(default_factory=Inner)


def test_an_option_is_written_once() -> None:
    """Flag, variable, type, default, help and heading follow from the field; fields without help are no options."""
    found = options_of(Outer)
    assert list(found) == ["speed", "size", "names"]
    assert (found["size"].flag, found["size"].variable, found["size"].default, found["size"].panel) == (
        "--size",
        "CACHEBLEND_SIZE",
        3,
        "Inner",
    )
    assert (found["speed"].type, found["speed"].help, found["speed"].panel) == (float | None, "Speed. One of 1, 2.", "Motion")
    assert found["names"].type == list[str] | None


def test_flat_values() -> None:
    """Flat values go to the config that has the field; None is the default; a copy keeps what is not named."""
    made = from_options(Outer, {"place": "here", "size": 5, "speed": None})
    assert made == Outer(place="here", inner=Inner(size=5))
    changed = from_options(Outer, {"speed": 2.0, "names": ("a",)}, made)
    assert changed == Outer(place="here", speed=2.0, inner=Inner(size=5, names=("a",)))
    assert from_options(Outer, {"place": "here", "inner": Inner(hidden=8)}).inner.hidden == 8


def test_refused() -> None:
    """A value of no field, one that is no option of a nested config, and a nested config beside its own option."""
    with pytest.raises(ConfigError, match=r"option='sise'.*size"):
        from_options(Outer, {"place": "here", "sise": 1})
    with pytest.raises(ConfigError, match="hidden"):
        from_options(Outer, {"place": "here", "hidden": 1})
    with pytest.raises(ConfigError, match="not beside size"):
        from_options(Outer, {"place": "here", "inner": Inner(), "size": 1})


def test_one_name_one_option() -> None:
    """Two configs whose options have one name cannot be set together."""
    with pytest.raises(TypeError, match="both have an option 'size'"):
        options_of(Outer, Inner)
