"""Calibrations on disk: found by model and prefix, and refused where damaged or of another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend.base.errors import ConfigError, ProfileError
from cacheblend.loader import Calibration, Measures, Thresholds, read_calibration, write_calibration
from cacheblend.loader.profile import calibration_path, prefix_digest

MODEL, PREFIX = "0123456789abcdef" * 4, prefix_digest([1, 2, 3])
MEASURES = Measures(
    cases=24,
    first_token_kl_nats=0.03,
    first_token_kl_low_nats=0.02,
    first_token_kl_high_nats=0.04,
    gold_nll_over_full_nats=None,
    equal_greedy_tokens=0.9,
    compute_share=0.12,
    ttft_s_median=0.5,
)
CALIBRATION = Calibration(
    model=MODEL,
    prefix=PREFIX,
    context="default",
    selector="gradual",
    ratio=0.1,
    measures=MEASURES,
    thresholds=Thresholds(max_kl=0.05),
    curve=((0.0, 0.09), (0.1, 0.03), (0.2, 0.02)),
)


def test_kept_and_found(tmp_path: Path) -> None:
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


def test_the_file_says_what_was_chosen(tmp_path: Path) -> None:
    """The file has format, setting, measures and thresholds by name, and no date."""
    kept = json.loads(write_calibration(tmp_path, CALIBRATION).read_text())
    assert set(kept) == {"format", "model", "prefix", "context", "selector", "ratio", "measures", "thresholds", "curve"}
    assert (kept["format"], kept["model"], kept["selector"], kept["ratio"]) == (1, MODEL, "gradual", 0.1)
    assert kept["measures"]["first_token_kl_nats"] == 0.03
    assert kept["thresholds"] == {"max_kl": 0.05, "max_nll": 0.05}
    assert kept["curve"] == [[0.0, 0.09], [0.1, 0.03], [0.2, 0.02]]


def test_a_file_without_a_curve(tmp_path: Path) -> None:
    """A calibration that was kept without its curve holds."""
    path = write_calibration(tmp_path, CALIBRATION)
    values = CALIBRATION.as_dict()
    del values["curve"]
    path.write_text(json.dumps(values))
    assert read_calibration(tmp_path, model=MODEL, prefix=PREFIX) == replace(CALIBRATION, curve=())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2"),
        ({"selector": "best"}, "selector='best'"),
        ({"selector": ["gradual"]}, "calibration"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"ratio": "0.1"}, "ratio='0.1'"),
        ({"context": None}, "context=None"),
        ({"measures": {}}, "cannot be used"),
        ({"measures": 3}, "cannot be used"),
        ({"thresholds": {"max_kl": -1}}, "max_kl"),
        ({"surplus": 1}, "surplus"),
        ({"curve": [[0.1, 0.2], [0, 0.3]]}, "curve="),
        ({"curve": [[0.1, "0.2"]]}, "curve="),
        ({"curve": [0.1]}, "cannot be used"),
    ],
)
def test_damaged_values(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """A value that cannot be is refused, with file, value and remedy."""
    path = write_calibration(tmp_path, CALIBRATION)
    path.write_text(json.dumps({**CALIBRATION.as_dict(), **change}))
    with pytest.raises(ProfileError, match="cacheblend calibrate") as error:
        read_calibration(tmp_path, model=MODEL, prefix=PREFIX)
    assert says in str(error.value)
    assert path.name in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 1}', '{"format": NaN}'])
def test_damaged_files(tmp_path: Path, text: str) -> None:
    """A file that is torn, or is something else, is refused."""
    path = calibration_path(tmp_path, model=MODEL, prefix=PREFIX)
    path.write_text(text)
    with pytest.raises(ProfileError, match="cacheblend calibrate"):
        read_calibration(tmp_path, model=MODEL, prefix=PREFIX)


@pytest.mark.parametrize("field", ["model", "prefix"])
def test_of_another(tmp_path: Path, field: str) -> None:
    """A file under this model's name that is of another model or prefix is refused, and both are named."""
    path = write_calibration(tmp_path, CALIBRATION)
    path.write_text(json.dumps({**CALIBRATION.as_dict(), field: "other"}))
    with pytest.raises(ProfileError, match=f"another {field}: 'other'"):
        read_calibration(tmp_path, model=MODEL, prefix=PREFIX)


def test_thresholds() -> None:
    """KL and the right answers' likelihood have a threshold each; the second counts where there are right answers."""
    allowed = Thresholds(max_kl=0.03, max_nll=0.01).allow
    assert allowed(MEASURES)
    assert allowed(replace(MEASURES, gold_nll_over_full_nats=-0.5))
    assert not allowed(replace(MEASURES, gold_nll_over_full_nats=0.02))
    assert not allowed(replace(MEASURES, first_token_kl_nats=0.031))
    for name in ("max_kl", "max_nll"):
        for value in (-0.1, float("nan"), True, "0.1"):
            with pytest.raises(ConfigError, match=name):
                Thresholds(**{name: value})  # type: ignore[arg-type]  # what a caller may do


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Where the folder is a file, the error names the folder."""
    (tmp_path / "profiles").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        write_calibration(tmp_path / "profiles", CALIBRATION)
