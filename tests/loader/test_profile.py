"""A profile is measured, a calibration chosen; both are kept, found again, and refused where they do not belong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from profiles import linear_profile

from cacheblend.base.errors import ConfigError, ProfileError
from cacheblend.blend import Fusor
from cacheblend.loader import (
    Calibration,
    LoaderConfig,
    describe_device,
    load_profile,
    measure_profile,
    read_calibration,
    read_profile,
    write_calibration,
    write_profile,
)
from cacheblend.loader.profile import prefix_digest


def test_a_measured_profile(fusor: Fusor, tmp_path: Path) -> None:
    """Prefills at every length, layers of blends at every ratio, and both tiers are measured; nothing is left over."""
    seen: list[tuple[str, int, int]] = []
    profile = measure_profile(
        fusor,
        tmp_path / "profiles",
        LoaderConfig(),
        chunk_tokens=16,
        lengths=(64, 16),
        on_progress=lambda *step: seen.append(step),
    )
    assert (profile.model, profile.device) == (fusor.fingerprint, describe_device(torch.device("cpu")))
    assert [sample.tokens for sample in profile.prefill] == [16, 64]
    layers = fusor.decoder.geometry.layers
    assert [sample.layer for sample in profile.blend] == [*range(layers)] * 8
    half = [sample for sample in profile.blend if sample.tokens == 64][2 * layers : 3 * layers]
    assert [sample.rows for sample in half] == sorted((sample.rows for sample in half), reverse=True)
    assert (half[0].rows, half[1].projected, half[2].projected) == (64, 64, 0)
    assert {sample.rows for sample in profile.blend[3 * layers : 4 * layers - 1]} == {16}
    assert (profile.blend[4 * layers - 1].rows, profile.blend[4 * layers - 1].projected) == (1, 16)
    assert set(profile.tiers) == {"ram", "nvme"}
    assert seen[-1] == ("profile", 9, 9)
    assert not list((tmp_path / "profiles").iterdir())
    write_profile(tmp_path, profile)
    assert read_profile(tmp_path, model=profile.model, device=profile.device) == profile


@pytest.mark.parametrize("lengths", [(), (0,)])
def test_bad_lengths(fusor: Fusor, tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """No length, or one below 1, is refused before anything is measured."""
    with pytest.raises(ConfigError, match="lengths"):
        measure_profile(fusor, tmp_path, LoaderConfig(), lengths=lengths)


def test_found_by_model_and_device(tmp_path: Path) -> None:
    """A profile is kept for its model and device alone, and a new one takes the place of the old."""
    profile = linear_profile()
    path = write_profile(tmp_path / "new", profile)
    write_profile(tmp_path / "new", profile)
    assert [file.name for file in (tmp_path / "new").iterdir()] == [path.name]
    assert read_profile(tmp_path / "new", model="model", device="device") == profile == load_profile(path)
    assert read_profile(tmp_path / "new", model="other", device="device") is None
    assert read_profile(tmp_path / "new", model="model", device="other") is None
    assert read_profile(tmp_path / "nowhere", model="model", device="device") is None


MODEL, PREFIX = "0123456789abcdef" * 4, prefix_digest([1, 2, 3])
CALIBRATION = Calibration(
    model=MODEL,
    prefix=PREFIX,
    context="default",
    selector="gradual",
    ratio=0.1,
    measures={"cases": 24},
    thresholds={"max_kl": 0.05},
)


def test_a_calibration_is_found(tmp_path: Path) -> None:
    """What is written is read again by model and prefix; a new one takes its place, and nothing else is left in the folder."""
    folder = tmp_path / "profiles"
    assert read_calibration(folder, model=MODEL, prefix=PREFIX) is None
    path = write_calibration(folder, CALIBRATION)
    assert read_calibration(folder, model=MODEL, prefix=PREFIX) == CALIBRATION
    newer = replace(CALIBRATION, ratio=0)
    assert write_calibration(folder, newer) == path
    assert read_calibration(folder, model=MODEL, prefix=PREFIX) == newer
    assert list(folder.iterdir()) == [path]
    assert read_calibration(folder, model="f" * 64, prefix=PREFIX) is None
    assert read_calibration(folder, model=MODEL, prefix=prefix_digest([1, 2])) is None


TORN = ["", "{", "[]", "null", '{"format": 1}', '{"format": NaN}']


@pytest.mark.parametrize(
    "change",
    [
        *TORN,
        {"format": 99},
        {"prefill": []},
        {"prefill": [{"tokens": 10, "seconds": "1"}]},
        {"prefill": [{"tokens": 0, "seconds": 1.0}]},
        {"prefill": [{"tokens": 10, "seconds": -1.0}]},
        {"prefill": [{"tokens": 10, "seconds": math.nan}]},
        {"prefill": 7},
        {"blend": []},
        {"tiers": {"ram": {"read_s": 0.0, "bytes_per_s": 0.0}}},
        {"tiers": None},
        {"tiers": {"ram": {"read_s": 0.0, "bytes_per_s": 1.0}}},
        {"layers": 0},
        {"layers": True},
        {"stranger": 1},
    ],
)
def test_damaged_profiles(tmp_path: Path, change: str | dict[str, object]) -> None:
    """A file that is torn, or whose values are not a profile's, is refused with file and remedy, whatever is wrong with it."""
    path = tmp_path / "profile.json"
    path.write_text(change if isinstance(change, str) else json.dumps(linear_profile().as_dict() | change))
    with pytest.raises(ProfileError, match=r"profile\.json.*cacheblend profile"):
        load_profile(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((text, "cannot be used") for text in TORN),
        ({"format": 2}, "format 2"),
        ({"selector": "best"}, "selector='best'"),
        ({"selector": ["gradual"]}, "calibration"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"ratio": "0.1"}, "ratio='0.1'"),
        ({"context": None}, "context=None"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_damaged_calibrations(tmp_path: Path, change: str | dict[str, object], says: str) -> None:
    """A file that is torn, or has a value that cannot be, is refused with file and remedy."""
    path = write_calibration(tmp_path, CALIBRATION)
    path.write_text(change if isinstance(change, str) else json.dumps(CALIBRATION.as_dict() | change))
    with pytest.raises(ProfileError, match="cacheblend calibrate") as error:
        read_calibration(tmp_path, model=MODEL, prefix=PREFIX)
    assert says in str(error.value)
    assert path.name in str(error.value)


def test_files_that_are_missing_or_cannot_be_made(tmp_path: Path) -> None:
    """A profile that is named and not there, and a folder that is a file, are errors with the path."""
    with pytest.raises(ProfileError, match=r"no\.json"):
        load_profile(tmp_path / "no.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="file"):
        write_profile(tmp_path / "file", linear_profile())
