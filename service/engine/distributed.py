"""Ingest on many machines: its settings, and the seam that an integration fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, cast

from cacheblend.base.checks import check_whole, is_number
from cacheblend.base.errors import ConfigError
from cacheblend.base.extras import needs_extra
from cacheblend.base.options import option

if TYPE_CHECKING:
    from cacheblend.base.progress import Progress

    from .config import EngineConfig
    from .document_sources import Shard, SourceReport
    from .ingest import IngestReport

ENTRY_POINTS = "cacheblend.ingest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Place and share of a Ray cluster that an ingest computes on.

    Raises:
        ConfigError: a value is not allowed.
    """

    ray: str | None = option(
        None, "Precompute in actors on Ray: local (on this machine, for this command), auto, or a cluster's address."
    )
    ray_actors: int = option(1, "Actors, each with a model of its own.")
    ray_cpus: float = option(1.0, "CPUs of an actor, and its threads.")
    ray_gpus: float = option(0.0, "GPUs of an actor; 0.5 puts two of them on one.")
    ray_batch_documents: int = option(64, "Documents that an actor takes at once; if it dies, others do them again.")

    def __post_init__(self) -> None:
        if self.ray is not None and not self.ray.strip():
            raise ConfigError("ray", self.ray, "local, auto, or an address such as 10.0.0.1:6379")
        check_whole("ray_actors", self.ray_actors)
        check_whole("ray_batch_documents", self.ray_batch_documents)
        if not is_number(self.ray_cpus) or self.ray_cpus <= 0:
            raise ConfigError("ray_cpus", self.ray_cpus, "a number above 0")
        if not is_number(self.ray_gpus) or self.ray_gpus < 0:
            raise ConfigError("ray_gpus", self.ray_gpus, "0, a share below 1, or a whole number of GPUs")
        if self.ray_gpus > 1 and self.ray_gpus != int(self.ray_gpus):
            raise ConfigError("ray_gpus", self.ray_gpus, "0, a share below 1, or a whole number of GPUs")


class DistributedIngest(Protocol):
    """An ingest whose chunks are computed by other processes."""

    def __call__(
        self,
        sources: Sequence[str],
        config: EngineConfig,
        settings: RayConfig,
        *,
        shard: Shard,
        report: SourceReport,
        progress: Progress,
    ) -> IngestReport:
        """Split, index and precompute the documents of files; what is stored already is skipped.

        Args:
            sources: files, folders and patterns, here or in an object store.
            config: of the engine.
            settings: where to compute.
            shard: ingests only the documents of this share.
            report: takes what could not be used.
            progress: follows the ingest.

        Raises:
            CacheBlendError: it ended early; what was done is kept, and the same call goes on from there.
        """


def distributed_ingest() -> DistributedIngest:
    """The integration; it is named as an entry point, since what computes elsewhere stands above this floor.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    with needs_extra("ray"):
        import_module("ray")
    (entry,) = entry_points(group=ENTRY_POINTS, name="ray")
    return cast(DistributedIngest, entry.load())
