"""The scheduler's configuration, which needs no torch."""

from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_share, check_whole, is_number, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Limits of a `Scheduler`, and its quality guard (`ShadowEvaluation`).

    By default one blended request in a hundred is compared with full prefill, while nothing else runs, and the result is
    reported: which agreement is good enough differs by model and by use.

    Raises:
        ConfigError: a value is not allowed.
    """

    max_num_seqs: int = option(16, "Requests that hold a KV cache at once: those that decode, and the one that is prefilled.")
    max_waiting: int = option(64, "Requests of a tenant that may be prepared or wait; the next one is refused.")
    max_uploads: int = option(8, "Uploads of a tenant that may wait or run; the next one is refused.")
    deadline_s: float = option(
        300.0, "Seconds from arrival after which a request is given up, or an upload that its client waits for, if not begun."
    )
    grace_s: float = option(30.0, "Seconds in which running requests may end when the service stops; uploads have half of it.")
    guard_share: float = option(0.01, "Share, 0 to 1, of blends compared with full prefill when idle.", panel="Quality guard")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "max_uploads"):
            check_whole(name, getattr(self, name))
        if not is_number(self.deadline_s) or self.deadline_s <= 0:
            raise ConfigError("deadline_s", self.deadline_s, "seconds, above 0")
        if not is_number(self.grace_s) or self.grace_s < 0:
            raise ConfigError("grace_s", self.grace_s, "seconds, 0 or above")
        check_share("guard_share", self.guard_share)
