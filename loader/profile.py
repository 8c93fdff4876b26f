"""Measurements as JSON files beside the store: a model's profile on a device (paper §5.1), and its calibrated setting."""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend.base.errors import ProfileError
from cacheblend.base.files import make_folder, replacing
from cacheblend.base.options import is_number, is_whole
from cacheblend.blend import SELECTORS

PROFILE_FORMAT, CALIBRATION_FORMAT = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """A full prefill of `tokens` tokens took `seconds`, to the first logits."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """One layer of a blend over loaded KV."""

    layer: int  # layer 0 runs every row
    tokens: int  # of the prompt
    rows: int  # that went through attention and MLP
    projected: int  # rows whose fresh K and V were projected for comparison; 0 if the layer did not check
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """Cost of reading from a tier, including the checksum and the copy to the layer's place on the device."""

    read_s: float  # constant seconds of a read, with the loader's number of reads in flight
    bytes_per_s: float  # throughput beyond that

    def __post_init__(self) -> None:
        if not (is_number(self.read_s) and self.read_s >= 0 and is_number(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ProfileError(f"read_s={self.read_s!r} of a tier must be 0 or more, bytes_per_s={self.bytes_per_s!r} above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of one model on one device, beside the store whose disk was measured.

    Raises:
        ProfileError: a measurement is impossible or missing.
    """

    model: str  # fingerprint, which has the compute dtype in it
    device: str  # name, from `describe_device`
    layers: int
    layer_token_bytes: int  # of one token's raw KV in one layer
    prefill: tuple[PrefillSample, ...]  # of at least one length
    blend: tuple[LayerSample, ...]  # at least one of layer 0, and one later one where the model has several layers
    logits_s: float  # from the last layer to the first logits
    tiers: Mapping[str, TierSpeed]  # "ram" and "nvme"

    def __post_init__(self) -> None:
        measured, wanted = {min(sample.layer, 1) for sample in self.blend}, {0, 1} if self.layers > 1 else {0}
        if not self.prefill or not measured >= wanted or not self.tiers.keys() >= {"ram", "nvme"}:
            raise ProfileError("a profile needs a full prefill, of blends a layer 0 and a later one, and tiers ram and nvme")
        samples: tuple[PrefillSample | LayerSample, ...] = (*self.prefill, *self.blend)
        rows = [count for sample in self.blend for count in (sample.layer, sample.rows, sample.projected)]
        bad = [x for x in (self.logits_s, *(sample.seconds for sample in samples), *rows) if not is_number(x) or x < 0]
        counts = [self.layers, self.layer_token_bytes, *(sample.tokens for sample in samples)]
        if bad := bad + [count for count in counts if not is_whole(count) or count < 1]:
            raise ProfileError(f"a profile of {self.device} has {bad[0]!r} for seconds or a count")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": PROFILE_FORMAT, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The setting that `cacheblend calibrate` chose for a model.

    Raises:
        ProfileError: a value is of another kind, the selector unknown, or the ratio outside 0..1.
    """

    model: str  # fingerprint, which has the compute dtype in it
    prefix: str  # `prefix_digest` of the prompts
    context: str  # of the chunks' KV: "default" (filler and document), "filler", "document", "head", or another measured one
    selector: str  # one of `SELECTORS`
    ratio: float  # r*, 0..1
    measures: Mapping[str, Any]  # this setting's losses against full recompute, for who reads the file
    thresholds: Mapping[str, Any]  # those accepted; if no setting was within them, the one of least KL was chosen

    def __post_init__(self) -> None:
        is_good = {name: isinstance(getattr(self, name), str) for name in ("model", "prefix", "context")}
        is_good |= {"selector": self.selector in SELECTORS, "ratio": is_number(self.ratio) and 0 <= self.ratio <= 1}
        for name, good in is_good.items():
            if not good:
                raise ProfileError(f"a calibration cannot have {name}={getattr(self, name)!r}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": CALIBRATION_FORMAT, **asdict(self)}


def describe_device(device: torch.device) -> str:
    """The device as a profile names it: the GPU's name, or the CPU's and the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def prefix_digest(prefix_ids: Sequence[int]) -> str:
    """Digest of the token ids that every prompt begins with, instruction and chat template, in hex."""
    return hashlib.sha256(",".join(map(str, prefix_ids)).encode()).hexdigest()


def profile_path(directory: Path, *, model: str, device: str) -> Path:
    """The file of a model's profile on a device, in the folder of profiles; of this torch version and format."""
    suffix = hashlib.sha256(f"{device}\n{torch.__version__}\n{PROFILE_FORMAT}".encode()).hexdigest()
    return directory / f"{model}-{suffix}.json"


def calibration_path(directory: Path, *, model: str, prefix: str) -> Path:
    """The file of a model's calibration after a prefix, in the folder of profiles."""
    return directory / f"{model}-{prefix}.calibration.json"


def read_profile(directory: Path, *, model: str, device: str) -> Profile | None:
    """Read the profile of a model on a device; None if there is none.

    Args:
        directory: the folder of profiles.
        model: the model's fingerprint.
        device: name of the device, from `describe_device`.

    Raises:
        ProfileError: the file is damaged.
    """
    path = profile_path(directory, model=model, device=device)
    return load_profile(path) if path.is_file() else None


def load_profile(path: Path) -> Profile:
    """Read the profile in a file, wherever it was measured.

    Raises:
        ProfileError: the file is missing or damaged.
    """
    with _values_of(path, "profile", PROFILE_FORMAT) as values:
        values["prefill"] = tuple(PrefillSample(**sample) for sample in values["prefill"])
        values["blend"] = tuple(LayerSample(**sample) for sample in values["blend"])
        values["tiers"] = {tier: TierSpeed(**speed) for tier, speed in values["tiers"].items()}
        return Profile(**values)


def read_calibration(directory: Path, *, model: str, prefix: str) -> Calibration | None:
    """Read the calibration of a model after a prefix; None if there is none.

    Args:
        directory: the folder of profiles.
        model: the model's fingerprint.
        prefix: `prefix_digest` of the prompts.

    Raises:
        ProfileError: the file is damaged, or of another format.
    """
    path = calibration_path(directory, model=model, prefix=prefix)
    if not path.is_file():
        return None
    with _values_of(path, "calibrate", CALIBRATION_FORMAT) as values:
        return Calibration(**values)


def write_profile(directory: Path, profile: Profile) -> Path:
    """Write a profile, in place of an older one of that model and device; returns its path.

    Raises:
        ProfileError: the folder cannot be written.
    """
    return _write(profile_path(directory, model=profile.model, device=profile.device), profile.as_dict())


def write_calibration(directory: Path, calibration: Calibration) -> Path:
    """Write a calibration, in place of an older one of that model and prefix; returns its path.

    Raises:
        ProfileError: the folder cannot be written.
    """
    return _write(calibration_path(directory, model=calibration.model, prefix=calibration.prefix), calibration.as_dict())


@contextmanager
def _values_of(path: Path, command: str, version: int) -> Iterator[dict[str, Any]]:
    """The values in a file that `cacheblend COMMAND` wrote; an error about them names the file and the command."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if (found := values.pop("format")) != version:
            raise ProfileError(f"its format {found!r} is not {version}")
        yield values
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ProfileError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ProfileError(f"{path} cannot be used: {why}; run `cacheblend {command}` again") from error


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    """Replace a file by a JSON object in one step; its folder is made if missing."""
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    try:
        make_folder(path.parent)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ProfileError(f"measurements cannot be written to {path.parent}: {error}; give a folder that can be") from error
    return path
