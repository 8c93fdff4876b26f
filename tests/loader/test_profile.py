"""A profile is measured, kept, found again, and refused where it does not belong."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from profiles import linear_profile

from cacheblend.base.errors import ConfigError, ProfileError
from cacheblend.blend import Fusor
from cacheblend.loader import LoaderConfig, describe_device, load_profile, measure_profile, read_profile, write_profile
from cacheblend.loader.profile import profile_path


def test_a_measured_profile(fusor: Fusor, tmp_path: Path) -> None:
    """Prefills at every length, layers of blends at every ratio, and both tiers are measured; nothing is left over."""
    seen: list[tuple[str, int, int]] = []
    profile = measure_profile(
        fusor,
        tmp_path / "profiles",
        LoaderConfig(),
        chunk_tokens=16,
        lengths=(64, 16),
        ratios=(0.25, 1.0),
        repeats=1,
        on_progress=lambda *step: seen.append(step),
    )
    assert (profile.model, profile.device) == (fusor.fingerprint, describe_device(torch.device("cpu")))
    assert [sample.tokens for sample in profile.prefill] == [16, 64]
    layers = fusor.decoder.geometry.layers
    assert [sample.layer for sample in profile.blend] == [*range(layers)] * 4
    quarter = [sample for sample in profile.blend if sample.tokens == 64][:layers]
    assert [sample.rows for sample in quarter] == sorted((sample.rows for sample in quarter), reverse=True)
    assert (quarter[0].rows, quarter[1].projected, quarter[2].projected) == (64, 64, 0)
    assert {sample.rows for sample in profile.blend[layers : 2 * layers - 1]} == {16}
    assert (profile.blend[2 * layers - 1].rows, profile.blend[2 * layers - 1].projected) == (1, 16)
    assert set(profile.tiers) == {"ram", "nvme"}
    assert seen[-1] == ("profile", 5, 5)
    assert not list((tmp_path / "profiles").iterdir())
    write_profile(tmp_path, profile)
    assert read_profile(tmp_path, model=profile.model, device=profile.device) == profile


@pytest.mark.parametrize(
    ("option", "value"), [("lengths", ()), ("lengths", (0,)), ("ratios", (0.0,)), ("ratios", (1.5,)), ("repeats", 0)]
)
def test_bad_options(fusor: Fusor, tmp_path: Path, option: str, value: object) -> None:
    """A length, ratio or number of repeats outside its range is refused before anything is measured."""
    with pytest.raises(ConfigError, match=option):
        measure_profile(fusor, tmp_path, LoaderConfig(), **{option: value})


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


def test_in_another_profiles_place(tmp_path: Path) -> None:
    """A file that was copied from another machine is refused by what it says it was measured on."""
    written = write_profile(tmp_path, linear_profile(device="GPU A"))
    written.rename(profile_path(tmp_path, model="model", device="GPU B"))
    with pytest.raises(ProfileError, match="another device: 'GPU A', and this is 'GPU B'"):
        read_profile(tmp_path, model="model", device="GPU B")


def test_of_another_torch() -> None:
    """A profile of another torch build is refused: its kernels are others."""
    with pytest.raises(ProfileError, match=r"another torch: '1\.0'"):
        dataclasses.replace(linear_profile(), torch_version="1.0").check(model="model", device="device")


@pytest.mark.parametrize(
    "change",
    [
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
def test_damaged(tmp_path: Path, change: dict[str, object]) -> None:
    """A file whose values are not a profile's is refused with the remedy, whatever is wrong with it."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(linear_profile().as_dict() | change))
    with pytest.raises(ProfileError):
        load_profile(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_not_json(tmp_path: Path, content: str) -> None:
    """A file that is no JSON object is refused by its path."""
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=r"profile\.json"):
        load_profile(path)


def test_missing(tmp_path: Path) -> None:
    """A profile that is named and not there is an error with its path."""
    with pytest.raises(ProfileError, match=r"no\.json"):
        load_profile(tmp_path / "no.json")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A folder that is a file is refused."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="file"):
        write_profile(tmp_path / "file", linear_profile())
