"""A profile: measured costs of a model on a device and of the tiers on its disk, stored as JSON (paper §5.1)."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend.base.errors import ProfileError
from cacheblend.base.files import make_folder, replacing

PROFILE_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """A full prefill of `tokens` tokens took `seconds`, to the first logits."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """One layer of a blend over loaded KV.

    Args:
        layer: its index; layer 0 runs every row.
        tokens: the prompt's tokens.
        rows: rows that went through attention and MLP.
        projected: rows whose fresh K and V were projected for comparison; 0 if the layer did not check.
        seconds: measured time.
    """

    layer: int
    tokens: int
    rows: int
    projected: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """Cost of reading from a tier, including the checksum and the copy to the layer's place on the device.

    Args:
        read_s: constant seconds of a read, with the loader's number of reads in flight.
        bytes_per_s: throughput beyond that.
    """

    read_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.read_s < math.inf and self.bytes_per_s > 0):
            raise ProfileError(
                f"a tier with read_s={self.read_s} and bytes_per_s={self.bytes_per_s} cannot be: "
                "the first is 0 or more, the second above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of one model on one device, beside the store whose disk was measured.

    Args:
        model: the model's fingerprint, which has the compute dtype in it.
        device: name of the device, from `describe_device`.
        torch_version: version of the measured build.
        layers: layers of the model.
        layer_token_bytes: bytes of one token's raw KV in one layer.
        prefill: full prefills, of at least one length.
        blend: layers of blends; at least one of layer 0, and one later one where the model has several layers.
        logits_s: seconds from the last layer to the first logits.
        tiers: speed by tier: "ram" and "nvme".

    Raises:
        ProfileError: a measurement is impossible or missing.
    """

    model: str
    device: str
    torch_version: str
    layers: int
    layer_token_bytes: int
    prefill: tuple[PrefillSample, ...]
    blend: tuple[LayerSample, ...]
    logits_s: float
    tiers: Mapping[str, TierSpeed]

    def __post_init__(self) -> None:
        later = any(sample.layer > 0 for sample in self.blend)
        if not self.prefill or all(sample.layer > 0 for sample in self.blend) or (self.layers > 1 and not later):
            raise ProfileError("a profile needs a full prefill, and of blends a layer 0 and a later one; measure it again")
        samples: tuple[PrefillSample | LayerSample, ...] = (*self.prefill, *self.blend)
        seconds = [self.logits_s, *(sample.seconds for sample in samples)]
        if not all(math.isfinite(took_s) and took_s >= 0 for took_s in seconds):
            raise ProfileError(f"a profile of {self.device} has seconds that cannot be: {min(seconds)} to {max(seconds)}")
        if missing := {"ram", "nvme"} - set(self.tiers):
            raise ProfileError(f"a profile of {self.device} lacks the tiers {', '.join(sorted(missing))}; measure it again")
        counts = [self.layers, self.layer_token_bytes, *(sample.tokens for sample in samples)]
        if min(counts) < 1:
            raise ProfileError(f"a profile of {self.device} has a count of {min(counts)}; every count is at least 1")

    def check(self, *, model: str, device: str) -> None:
        """Refuse a profile that was measured elsewhere.

        Raises:
            ProfileError: the profile is of another model, device or torch.
        """
        mine = {"model": (self.model, model), "device": (self.device, device)}
        mine["torch"] = (self.torch_version, torch.__version__)
        for what, (measured, wanted) in mine.items():
            if measured != wanted:
                raise ProfileError(
                    f"the profile was measured on another {what}: {measured!r}, and this is {wanted!r}; "
                    "run `cacheblend profile` here"
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "format": PROFILE_FORMAT,
            **asdict(self),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Make a profile from the values of `as_dict`.

        Raises:
            ProfileError: the values are not a profile's.
        """
        try:
            given = dict(values)
            if (found := given.pop("format")) != PROFILE_FORMAT:
                raise ProfileError(f"the profile has format {found!r}, not {PROFILE_FORMAT}; run `cacheblend profile` again")
            given["prefill"] = tuple(PrefillSample(**_numbers(sample)) for sample in given["prefill"])
            given["blend"] = tuple(LayerSample(**_numbers(sample)) for sample in given["blend"])
            given["tiers"] = {str(tier): TierSpeed(**_numbers(speed)) for tier, speed in given["tiers"].items()}
            given |= _numbers({name: given[name] for name in ("layers", "layer_token_bytes", "logits_s")})
            return cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"not a profile: {type(error).__name__} {error}; run `cacheblend profile` again") from error


def describe_device(device: torch.device) -> str:
    """The device as a profile names it: the GPU's name, or the CPU's and the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def profile_name(model: str, device: str) -> str:
    """The file name of a profile: model, and a digest of device, torch version and format."""
    suffix = hashlib.sha256(f"{device}\n{torch.__version__}\n{PROFILE_FORMAT}".encode()).hexdigest()
    return f"{model[:16]}-{suffix[:16]}.json"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _numbers(sample: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in sample.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r} is not a number")
    return dict(sample)


def read_profile(directory: Path, *, model: str, device: str) -> Profile | None:
    """Read the profile of a model on a device; None if there is none.

    Args:
        directory: the folder of profiles.
        model: the model's fingerprint.
        device: name of the device, from `describe_device`.

    Raises:
        ProfileError: the file is damaged, or was measured elsewhere.
    """
    path = directory / profile_name(model, device)
    if not path.is_file():
        return None
    profile = load_profile(path)
    profile.check(model=model, device=device)
    return profile


def load_profile(path: Path) -> Profile:
    """Read the profile in a file, wherever it was measured.

    Raises:
        ProfileError: the file is missing or damaged.
    """
    return Profile.from_dict(read_object(path, "profile"))


def write_profile(directory: Path, profile: Profile) -> Path:
    """Write a profile, in place of an older one of that model and device; returns its path.

    Raises:
        ProfileError: the folder cannot be written.
    """
    path = directory / profile_name(profile.model, profile.device)
    write_object(path, profile.as_dict(), "profile")
    return path


def read_object(path: Path, command: str) -> dict[str, Any]:
    """Read the JSON object in a file that `cacheblend COMMAND` wrote.

    Raises:
        ProfileError: the file is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read: {error}; run `cacheblend {command}` again") from error
    if not isinstance(values, dict):
        raise ProfileError(f"{path} is not a JSON object; run `cacheblend {command}` again")
    return values


def write_object(path: Path, values: Mapping[str, Any], what: str) -> None:
    """Replace a file by a JSON object in one step; its folder is made if missing.

    Raises:
        ProfileError: the folder cannot be written.
    """
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    try:
        make_folder(path.parent)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ProfileError(f"the {what} cannot be written to {path.parent}: {error}; give a folder that can be") from error
