"""How stored KV is loaded, and when a higher ratio costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.store.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Bounds of the loader thread and defaults of the loading controller.

    Args:
        lookahead_layers: how many layers the loader may hold ready ahead of the fusor; each takes the bytes of the whole
            prompt's KV in one layer.
        quality_ratio: r*, the smallest recompute ratio whose quality loss is negligible (paper §5.1; figure 16 gives 0.15).
        max_ratio: the controller never asks for more, however long the loading takes.
        ram_bytes_per_s: throughput of the RAM tier.
        nvme_bytes_per_s: throughput of the NVMe tier, checksums included.

    Raises:
        ConfigError: a value outside its range.
    """

    lookahead_layers: int = 2
    quality_ratio: float = 0.15
    max_ratio: float = 1.0
    ram_bytes_per_s: float = 10e9
    nvme_bytes_per_s: float = 3e9

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead_layers, int) or isinstance(self.lookahead_layers, bool) or self.lookahead_layers < 1:
            raise ConfigError("lookahead_layers", self.lookahead_layers, "a whole number of at least 1")
        if not 0 <= self.quality_ratio <= 1:
            raise ConfigError("quality_ratio", self.quality_ratio, "a number from 0 to 1")
        if not self.quality_ratio <= self.max_ratio <= 1:
            raise ConfigError("max_ratio", self.max_ratio, f"a number from quality_ratio ({self.quality_ratio}) to 1")
        for name in ("ram_bytes_per_s", "nvme_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "a number above 0")
