"""`cacheblend model`, `profile` and `plan`: what they print and leave, and how they fail."""

import shutil
from pathlib import Path

import pytest
from command_line import CommandLine
from profiles import linear_profile
from transformers import LlamaForCausalLM

from cacheblend.base.errors import ModelFetchError
from cacheblend.blend import models
from cacheblend.blend.decoder import Decoder
from cacheblend.blend.models import find_model
from cacheblend.loader import write_profile

pytestmark = pytest.mark.usefixtures("own_cache")


def _pretend_fetched(name: str) -> Path:
    folder = find_model(name).folder
    folder.mkdir(parents=True)
    (folder / "origin.json").write_text("{}")
    return folder


def test_ls(run: CommandLine) -> None:
    """The list says what is on this machine and where."""
    folder = _pretend_fetched("smollm2-135m")
    found = {model["name"]: model for model in run("model", "ls", "--json").json["models"]}
    assert (found["smollm2-135m"]["fetched"], found["smollm2-135m"]["path"]) == (True, str(folder))
    assert (found["gemma3-270m"]["fetched"], found["gemma3-270m"]["path"]) == (False, None)
    assert "gemma3" in run("model", "ls").out


def test_get_what_is_there(run: CommandLine) -> None:
    """A second `get` does nothing and says so, in JSON and in words."""
    folder = _pretend_fetched("gemma3-270m")
    found = run("model", "get", "gemma3-270m", "--json").json
    assert (found["already_there"], found["path"], found["licence"]) == (True, str(folder), "Gemma Terms of Use")
    assert "is there already" in run("model", "get", "gemma3-270m").out


@pytest.mark.parametrize("flag", ["--accept-licence", "--accept-license"])
def test_terms_names_and_downloads(flag: str, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that are not accepted, in either spelling, are the user's errors; a failed download is not."""

    def nothing(*_: object) -> Path:
        raise ModelFetchError("no network")

    monkeypatch.setattr(models.fetch_model, "__kwdefaults__", {**models.fetch_model.__kwdefaults__, "download": nothing})
    for arguments, code, says in (
        (("gemma3-270m",), 2, "https://ai.google.dev/gemma/terms"),
        (("gemma3-270m", flag), 1, "no network"),
    ):
        outcome = run("model", "get", *arguments)
        assert (outcome.code, says in outcome.err) == (code, True)


def test_profile_then_plan(run: CommandLine) -> None:
    """From the file that `profile` leaves beside the store, `plan` compares the devices, sorted by price."""
    small = ("--length", "16", "--length", "64", "--chunk-tokens", "16")
    measured = run("profile", str(run.model), "--store-dir", str(run.store), *small, "--json").json
    assert [sample["tokens"] for sample in measured["prefill"]] == [16, 64]
    assert Path(str(measured["file"])).parent == run.store / "profiles"
    plan = run("plan", str(measured["file"]), "--tokens", "48", "--json").json
    assert plan["profiled_on"] == measured["device"]
    prices = [row["price_per_month"] for row in plan["devices"]]
    assert prices == sorted(prices)


def test_cheapest_without_delay(run: CommandLine, tmp_path: Path) -> None:
    """The cheapest device that adds no delay is named, as a table and as JSON."""
    profile = str(write_profile(tmp_path, linear_profile()))
    plan = run("plan", profile, "--tokens", "1000", "--json").json
    assert plan["cheapest"] == next(row["device"] for row in plan["devices"] if row["adds_no_delay"])
    assert "1,000 reused tokens" in run("plan", profile, "--tokens", "1000").out


def test_bad_profiles_and_plans(run: CommandLine, tmp_path: Path) -> None:
    """What is missing or out of range ends in one line that names it, and nothing is written."""
    profile = str(write_profile(tmp_path, linear_profile()))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_act": "nope"}')
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(100))
    for arguments, code, says in (
        (("plan", "nowhere.json"), 2, "nowhere.json"),
        (("plan", str(tmp_path / "config.json")), 2, "'nope'"),
        (("plan", str(tmp_path / "cut.gguf")), 2, "truncated or damaged"),
        (("plan", profile, "--tokens", "0"), 2, "'--tokens'"),
        (("plan", profile, "--ratio", "2"), 2, "'--ratio'"),
        (("profile", str(run.model), "--store-dir", str(run.store), "--length", "0"), 2, "lengths=(0,)"),
    ):
        outcome = run(*arguments)
        assert (outcome.code, outcome.out, says in outcome.err) == (code, "", True)
    assert not run.store.exists()


def test_plan_of_models(run: CommandLine, tmp_path: Path) -> None:
    """Without an argument `plan` prints a table of ten models; of a model it reads the config and counts its weights."""
    assert len(run("plan").out.splitlines()[1:-1]) == 10

    model = LlamaForCausalLM.from_pretrained(run.model)
    (tmp_path / "alone").mkdir()
    config = Path(shutil.copy(run.model / "config.json", tmp_path / "alone"))
    for place in (run.model, config):
        [found] = run("plan", str(place), "--json").json["models"]
        assert found["weights"] == sum(weights.numel() for weights in model.parameters())
        assert found["raw"] == model.config.num_hidden_layers * Decoder(model.bfloat16()).geometry.layer_bytes(1)
