"""The loader's configuration, which needs no torch."""

from dataclasses import dataclass

from cacheblend.base.options import MIB, check_share, check_whole
from cacheblend.blend import DEFAULT_RATIO

LENGTHS = (256, 1024, 4096)  # of prompts that a profile measures


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Bounds of the loader's threads and defaults of the loading controller.

    Args:
        lookahead_bytes: bytes of layers that the loader may hold ahead of the fusor; one layer always.
        reads_in_flight: number of concurrent reads, each in a thread; on a CPU of files only.
        quality_ratio: r*, the smallest recompute ratio whose quality loss is negligible (paper §5.1); `FusionConfig`'s default.
            If it has its default, an engine uses the ratio of its store's calibration (`cacheblend calibrate`); to use the
            default itself, set `FusionConfig.recompute_ratio`.

    Raises:
        ConfigError: a value is outside its range.
    """

    lookahead_bytes: int = 256 * MIB
    reads_in_flight: int = 4
    quality_ratio: float = DEFAULT_RATIO

    def __post_init__(self) -> None:
        for name in ("lookahead_bytes", "reads_in_flight"):
            check_whole(name, getattr(self, name))
        check_share("quality_ratio", self.quality_ratio)

    def lookahead_layers(self, layer_bytes: int) -> int:
        """Number of layers of `layer_bytes` that may be ready ahead of the fusor."""
        return max(1, self.lookahead_bytes // max(1, layer_bytes))
