"""A run's folder: its set-up, raw rows as they come, and the summary; never overwritten, continued after a kill."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.base.options import check_whole
from cacheblend.blend import DEFAULT_RATIO
from cacheblend.eval.method_plan import CONTEXTS, METHODS, PlannedMethod, plan_methods
from cacheblend.service.engine.config import DTYPES
from cacheblend.store.codecs import CODECS

if TYPE_CHECKING:
    from cacheblend.blend import Fusor
    from cacheblend.eval.data import RequestSource

SETUP, ROWS, SUMMARY = "setup.json", "rows.jsonl", "summary.json"
Row = dict[str, Any]


class RunFolder:
    """A folder of three files.

    `setup.json` holds the resolved configuration, model, machine and commit; `rows.jsonl` a line a case with every method in
    it; `summary.json` the result of `summarize`, once the run is complete.

    Args:
        path: the folder, as `create` or `resume` left it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, setup: Mapping[str, Any]) -> RunFolder:
        """A new folder.

        Raises:
            InputError: the folder exists.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise InputError(f"{path} exists; choose another --out, or go on with that run by --resume") from error
        _write(path / SETUP, setup)
        return cls(path)

    @classmethod
    def resume(cls, path: Path, setup: Mapping[str, Any]) -> RunFolder:
        """The folder of a run that was cut off.

        Raises:
            InputError: no run, or one with another set-up.
        """
        run = cls(path)
        before, now = run.setup(), json.loads(json.dumps(setup))
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            said = "; ".join(f"{name}: {before.get(name)!r} before, {now.get(name)!r} now" for name in different)
            raise InputError(f"{path} is a run with another set-up, so it cannot go on: {said}")
        run._drop_torn_line()
        return run

    def setup(self) -> dict[str, Any]:
        """What `setup.json` says.

        Raises:
            InputError: the folder is no run.
        """
        try:
            setup: dict[str, Any] = json.loads((self.path / SETUP).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} is not the folder of a run: its {SETUP} cannot be read ({error})") from error
        return setup

    def rows(self) -> list[Row]:
        """A row a case, in order; a last line torn by a kill is left out.

        Raises:
            InputError: another line is broken.
        """
        file = self.path / ROWS
        if not file.exists():
            return []
        rows: list[Row] = []
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{file}, line {number} is broken ({error}); the run cannot be used") from error
        return rows

    def append(self, row: Row) -> None:
        """Add a case's row; it is on disk when this returns."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        _write(self.path / SUMMARY, summary)

    def _drop_torn_line(self) -> None:
        file = self.path / ROWS
        if file.exists():
            complete = file.read_bytes().rpartition(b"\n")[0]
            os.truncate(file, len(complete) + 1 if complete else 0)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


LIBRARIES = ("cacheblend", "torch", "transformers")


def has_random_weights(fusor: Fusor) -> bool:
    """Whether the model's own configuration says that its weights were never trained."""
    return bool(getattr(fusor.model.config, "random_weights", False))


def environment(fusor: Fusor) -> dict[str, Any]:
    """Plain values for a run's `setup.json`."""
    device = fusor.decoder.device
    return {
        "fingerprint": fusor.fingerprint,
        "weights": "random" if has_random_weights(fusor) else "trained",
        "dtype": str(fusor.decoder.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" where tracked files differ from it; None where the code is no checkout."""
    source = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(source.parent), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return found.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # else it is a package inside somebody's checkout
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """One data set, one model, several methods.

    Args:
        source: the data set in its set-up.
        model: directory, GGUF file, hub id or known name.
        methods: names, see `METHODS`; differences are taken against full_recompute where it is among them.
        ratios: recompute ratios, 0..1, of the methods that take one.
        contexts: what the stored KV was computed after, of `CONTEXTS`, for the methods that reuse it.
        max_new_tokens: upper bound on the tokens of an answer; None is the data set's.
        kv_cache_dtype: the codec that chunks' KV is stored with.
        device: a torch device.
        dtype: auto, float32, bfloat16 or float16.
        allow_unverified: take a model of an unverified family if the built-in check passes.

    Raises:
        ConfigError: a value is not allowed.
    """

    source: RequestSource
    model: str
    methods: tuple[str, ...] = METHODS
    ratios: tuple[float, ...] = (DEFAULT_RATIO,)
    contexts: tuple[str, ...] = CONTEXTS[:1]
    max_new_tokens: int | None = None
    kv_cache_dtype: str = "raw"
    device: str = "cpu"
    dtype: str = "auto"
    allow_unverified: bool = False

    def __post_init__(self) -> None:
        self.planned()
        for field, value, allowed in (("dtype", self.dtype, DTYPES), ("kv_cache_dtype", self.kv_cache_dtype, CODECS)):
            if value not in allowed:
                raise ConfigError(field, value, f"one of {', '.join(allowed)}")
        if self.max_new_tokens is not None:
            check_whole("max_tokens", self.max_new_tokens)

    def planned(self) -> tuple[PlannedMethod, ...]:
        """Methods and ratios as they run."""
        return plan_methods(self.methods, self.ratios, self.contexts)

    @property
    def new_tokens(self) -> int:
        """Upper bound on the tokens of an answer."""
        return self.max_new_tokens or self.source.new_tokens

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain values."""
        return {
            **asdict(self),
            "source": {"data_set": self.source.name, **asdict(self.source)},  # type: ignore[call-overload]  # all are dataclasses
            "methods": list(self.methods),
            "ratios": list(self.ratios),
            "contexts": list(self.contexts),
            "max_new_tokens": self.new_tokens,
        }
