"""`cacheblend profile` measures and keeps; `cacheblend plan` compares devices with what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from profiles import linear_profile

from cacheblend.cli import main as cli
from cacheblend.loader import write_profile


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `cacheblend`, in this process."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_profile_then_plan(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """What `profile` keeps beside the store, `plan` finds by the model, and sorts the devices by price."""
    store = ("--store-dir", tmp_path / "store")
    code, _, err = run(capsys, "plan", model_dir, *store)
    assert code == 1
    assert "cacheblend profile" in err
    small = ("--length", 16, "--length", 64, "--ratio", 0.25, "--repeats", 1, "--chunk-tokens", 16)
    code, out, _ = run(capsys, "profile", model_dir, *store, *small, "--json")
    assert code == 0
    measured = json.loads(out)
    assert [sample["tokens"] for sample in measured["prefill"]] == [16, 64]
    assert Path(measured["file"]).parent == tmp_path / "store" / "profiles"
    code, out, _ = run(capsys, "plan", model_dir, *store, "--tokens", 48, "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["profiled_on"] == measured["device"]
    prices = [row["price_per_month"] for row in plan["devices"]]
    assert prices == sorted(prices)


def test_cheapest_without_delay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The cheapest device that adds no delay is named, on a profile file of another machine, as a table and as JSON."""
    profile = write_profile(tmp_path, linear_profile())
    code, out, _ = run(capsys, "plan", "--profile", profile, "--tokens", 1000, "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["cheapest"] == next(row["device"] for row in plan["devices"] if row["adds_no_delay"])
    code, out, _ = run(capsys, "plan", "--profile", profile, "--tokens", 1000)
    assert code == 0
    assert "1,000 reused tokens" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "give a model"),
        (("--profile", "nowhere.json"), 1, "nowhere.json"),
        (("--profile", "PROFILE", "--tokens", "0"), 2, "tokens=0"),
        (("--profile", "PROFILE", "--ratio", "2"), 2, "ratio=2.0"),
    ],
)
def test_bad_input(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    """What is missing or out of range ends in one line that names it, and the exit code for its kind."""
    monkeypatch.delenv("CACHEBLEND_MODEL", raising=False)
    profile = str(write_profile(tmp_path, linear_profile()))
    given = [profile if argument == "PROFILE" else argument for argument in arguments]
    got, out, err = run(capsys, "plan", *given)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_bad_measurements(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """A length that cannot be is refused before anything is measured or written."""
    code, _, err = run(capsys, "profile", model_dir, "--store-dir", tmp_path / "store", "--length", 0)
    assert code == 2
    assert "lengths=(0,)" in err
    assert not (tmp_path / "store").exists()
