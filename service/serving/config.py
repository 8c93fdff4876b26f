"""Limits of serving: requests at once, the time of each, and how closely their quality is watched."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.base.checks import check_share, check_whole, is_number
from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option

GUARD = "Quality guard"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Limits of a `Scheduler`, and its quality guard (`QualityGuard`).

    By default one blended request in a hundred is checked, which costs nothing while others run, and nothing is done about it:
    what agreement is good enough differs by model and by use, so `guard_floor` is the operator's to set.

    Raises:
        ConfigError: a value is not allowed.
    """

    max_num_seqs: int = option(
        16, "Requests that hold a KV cache at once: those that decode together, and the one that is prefilled."
    )
    max_waiting: int = option(64, "Requests of a tenant that may be prepared or wait; the next one is refused.")
    max_uploads: int = option(8, "Uploads of a tenant that may wait or run; the next one is refused.")
    max_document_calls: int = option(32, "The same of calls that list, show, pin or delete documents.")
    ingest_share: float = option(0.25, "Share of the time, above 0 to 1, for uploads while requests run or wait.")
    decode_share: float = option(
        0.25,
        "Share of the time, above 0 to 1, for requests that decode while another is prefilled. Lower brings first tokens "
        "earlier and more answers a second; the tokens after the first come later.",
    )
    deadline_s: float = option(300.0, "Seconds from a request's arrival after which it is given up; so is an upload not begun.")
    grace_s: float = option(30.0, "Seconds in which running requests may end when the service stops; uploads have half of it.")
    stall_s: float = option(60.0, "Seconds without any step after which `/readyz` says that the service is not ready.")
    guard_share: float = option(
        0.01, "Share, 0 to 1, of blended requests that are compared with full prefill when nothing else runs.", panel=GUARD
    )
    guard_floor: float = option(0.0, "Least mean agreement, 0 to 1; below it more is recomputed. 0 only measures.", panel=GUARD)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "max_uploads", "max_document_calls"):
            check_whole(name, getattr(self, name))
        for name, least in (("deadline_s", "above 0"), ("grace_s", "0 or above"), ("stall_s", "above 0")):
            value = getattr(self, name)
            if not is_number(value) or value < 0 or (value == 0 and name != "grace_s"):
                raise ConfigError(name, value, f"seconds, {least}")
        for name in ("guard_share", "guard_floor"):
            check_share(name, getattr(self, name))
        for name in ("decode_share", "ingest_share"):
            if not is_number(value := getattr(self, name)) or not 0 < value <= 1:
                raise ConfigError(name, value, "a number above 0, up to 1")
        if self.guard_floor and not self.guard_share:
            raise ConfigError("guard_floor", self.guard_floor, "0 where guard_share=0, since nothing is checked then")
