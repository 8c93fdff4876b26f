"""How stored KV is loaded, and when a higher ratio costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.base.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Bounds of the loader's threads and defaults of the loading controller.

    Args:
        lookahead_bytes: how many bytes of whole layers the loader may hold ready ahead of the fusor; one layer always.
        reads_in_flight: how many reads the loader has under way at once, each in a thread; on a CPU of files alone.
        quality_ratio: r*, the smallest recompute ratio whose quality loss is negligible (paper §5.1); `FusionConfig`'s default.
            An engine takes the ratio of its store's calibration (`cacheblend calibrate`) where this one is at its default, and
            no more than `max_ratio`; to have the default itself, set `EngineConfig.recompute_ratio`.
        max_ratio: the controller never asks for more, however long the loading takes.

    Raises:
        ConfigError: a value outside its range.
    """

    lookahead_bytes: int = 256 * MIB
    reads_in_flight: int = 4
    quality_ratio: float = 0.14
    max_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lookahead_bytes", "reads_in_flight"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        if not 0 <= self.quality_ratio <= 1:
            raise ConfigError("quality_ratio", self.quality_ratio, "a number from 0 to 1")
        if not self.quality_ratio <= self.max_ratio <= 1:
            raise ConfigError("max_ratio", self.max_ratio, f"a number from quality_ratio ({self.quality_ratio}) to 1")

    def lookahead_layers(self, layer_bytes: int) -> int:
        """Layers of so many bytes that may be ready ahead of the fusor."""
        return max(1, self.lookahead_bytes // max(1, layer_bytes))
