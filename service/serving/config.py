"""How many requests are served at once, how long each may take, and how closely their quality is watched."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Limits of a `Scheduler`, and its quality guard (`QualityGuard`).

    By default one blended request in a hundred is checked, which costs nothing while others run, and nothing is done about it:
    what agreement is good enough differs by model and by use, so `guard_floor` is the operator's to set.

    Args:
        max_num_seqs: requests that hold a KV cache at once: those that decode together, and the one that is prefilled.
        max_waiting: requests of one tenant that may be prepared or wait; the next one is refused.
        max_uploads: uploads of one tenant that may wait or run; the next one is refused.
        max_document_calls: the same of calls that list, show, pin or delete documents.
        ingest_share: share of the time, above 0 and up to 1, that uploads have while requests run or wait.
        decode_share: share of the time, above 0 and up to 1, that those with a first token get while another is
            prefilled. Lower brings first tokens sooner and answers more a second, and the tokens behind the first later.
        deadline_s: a request that is not answered so long after it came is given up, whatever it waits for; so is an upload
            that has not begun by then.
        grace_s: the service ends so long after it was told to stop, give or take a second. Running requests may go on
            meanwhile, uploads for half of it.
        stall_s: where nothing has got on for so long, `/readyz` says that the service is not ready.
        guard_share: share, 0..1, of the blended requests that are prefilled in full once more when nothing else runs.
        guard_tokens: first greedy tokens that are compared.
        guard_floor: least mean agreement of those, 0..1; below it the recompute ratio is raised. 0 measures alone.
        guard_window: checked requests that the mean is over.

    Raises:
        ConfigError: a value is not allowed.
    """

    max_num_seqs: int = 16
    max_waiting: int = 64
    max_uploads: int = 8
    max_document_calls: int = 32
    ingest_share: float = 0.25
    decode_share: float = 0.25
    deadline_s: float = 300.0
    grace_s: float = 30.0
    stall_s: float = 60.0
    guard_share: float = 0.01
    guard_tokens: int = 8
    guard_floor: float = 0.0
    guard_window: int = 20

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "max_uploads", "max_document_calls", "guard_tokens", "guard_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        for name, least in (("deadline_s", "above 0"), ("grace_s", "0 or above"), ("stall_s", "above 0")):
            value = getattr(self, name)
            if not _is_number(value) or value < 0 or (value == 0 and name != "grace_s"):
                raise ConfigError(name, value, f"seconds, {least}")
        for name in ("guard_share", "guard_floor"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value <= 1:
                raise ConfigError(name, value, "a number from 0 to 1")
        for name in ("decode_share", "ingest_share"):
            if not _is_number(value := getattr(self, name)) or not 0 < value <= 1:
                raise ConfigError(name, value, "a number above 0, up to 1")
        if self.guard_floor and not self.guard_share:
            raise ConfigError("guard_floor", self.guard_floor, "0 where guard_share=0, since nothing is checked then")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
