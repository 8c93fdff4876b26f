"""Precompute on Ray: actors that split, embed and compute documents' KV, and the ingest that commits what they deliver.

The settings stand here, without an import of Ray, so that the command line has its options.
"""

from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_whole, is_number, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Place and share of a Ray cluster that an ingest computes on.

    Raises:
        ConfigError: a value is not allowed.
    """

    ray: str | None = option(None, "Precompute on Ray: local (this machine, for this command), auto, or a cluster's address.")
    ray_actors: int = option(1, "Actors, each with a model of its own.")
    ray_cpus: float = option(1.0, "CPUs of an actor, and its threads.")
    ray_gpus: float = option(0.0, "GPUs of an actor; 0.5 puts two of them on one.")
    ray_batch_documents: int = option(64, "Documents of a batch; if its actor dies, another one does them again.")

    def __post_init__(self) -> None:
        if self.ray is not None and not self.ray.strip():
            raise ConfigError("ray", self.ray, "local, auto, or an address such as 10.0.0.1:6379")
        check_whole("ray_actors", self.ray_actors)
        check_whole("ray_batch_documents", self.ray_batch_documents)
        if not is_number(self.ray_cpus) or self.ray_cpus <= 0:
            raise ConfigError("ray_cpus", self.ray_cpus, "a number above 0")
        if not is_number(self.ray_gpus) or self.ray_gpus < 0 or (self.ray_gpus > 1 and self.ray_gpus != int(self.ray_gpus)):
            raise ConfigError("ray_gpus", self.ray_gpus, "0, a share below 1, or a whole number of GPUs")
