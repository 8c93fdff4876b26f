"""GGUF files: what is in them comes out of them, and those that cannot be used say why."""

import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_models import CONFIGS, tiny_checkpoint, write_gguf
from prompts import draw_ids
from tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cacheblend.base.errors import InputError, MissingExtraError
from cacheblend.blend import Fusor, UnsupportedModelError, gguf_file
from cacheblend.blend.families import file_digest
from cacheblend.blend.gguf_file import (
    ARCHITECTURES,
    ORIGIN,
    add_end_tokens,
    convert_gguf,
    converted_folder,
    is_converted,
    new_folder,
)
from cacheblend.blend.loading import load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_checkpoint("llama"), "llama")


def test_every_architecture_is_tried() -> None:
    """No architecture is taken from GGUF that does not go there and back below."""
    assert {name.split("-")[0] for name in CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """A model written as GGUF is an ordinary one of plain weights, with the logits of before, float rounding apart."""
    model = tiny_checkpoint(name)
    path = write_gguf(tmp_path / "tiny.gguf", model, name.split("-")[0])
    ids = torch.tensor([draw_ids(40, seed=1)])
    read: Any = Fusor.from_pretrained(str(path)).model
    assert getattr(read.config, "quantization_config", None) is getattr(read, "hf_quantizer", None) is None
    assert read.config.rope_parameters == model.config.rope_parameters
    with torch.no_grad():
        logits = read(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_conversion_is_made_once(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load reads the folder, and the fingerprint stays."""
    first = Fusor.from_pretrained(str(llama_file)).fingerprint
    monkeypatch.setattr(gguf_file, "convert_into", lambda *_: pytest.fail("converted again"))
    assert Fusor.from_pretrained(str(llama_file)).fingerprint == first


def test_the_tokenizer_of_the_file(llama_file: Path) -> None:
    """The vocabulary in the file is used, and digits stand alone where its merges were learned so."""
    tokenizer = load_tokenizer(str(llama_file))
    assert tokenizer.convert_ids_to_tokens(tokenizer("the 12th", add_special_tokens=False).input_ids) == [
        *("th", "e", "Ġ", "1", "2", "th")
    ]


def test_what_older_files_do_not_say(llama_file: Path, tmp_path: Path) -> None:
    """Llama 3's vocabularies put BOS first; a Phi-3 of 4,096 positions has a window, and is refused."""
    llama_file.write_bytes(llama_file.read_bytes().replace(b"smollm", b"tekken"))
    assert load_tokenizer(str(llama_file))("a").input_ids[0] == 1
    (model := tiny_checkpoint("phi3")).config.max_position_embeddings = 4096
    with pytest.raises(UnsupportedModelError, match="its attention has a window"):
        gguf_file.read_header(write_gguf(tmp_path / "m.gguf", model, "phi3"))


def test_a_tokenizer_beside_the_file(llama_file: Path, tmp_path: Path) -> None:
    """Without a tokenizer in it or beside it the file is refused; one beside it is used, also in place of one in it."""
    (tmp_path / "bare").mkdir()
    bare = write_gguf(tmp_path / "bare" / "bare.gguf", tiny_checkpoint("llama"), "llama", tokenizer=False)
    with pytest.raises(InputError, match=r"holds no tokenizer; put the model's tokenizer\.json"):
        Fusor.from_pretrained(str(bare))
    saved = load_tokenizer(str(llama_file))
    saved.chat_template = "of the folder"
    saved.save_pretrained(bare.parent)
    both = write_gguf(bare.with_name("both.gguf"), tiny_checkpoint("llama", seed=1), "llama")
    for path in (bare, both):
        assert load_tokenizer(str(path)).chat_template == "of the folder"


def test_the_tokenizer_of_another_model(llama_file: Path) -> None:
    """A tokenizer beside the file with more tokens than the model has is refused."""
    words = Tokenizer(WordLevel({str(number): number for number in range(200)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(llama_file.parent)
    with pytest.raises(InputError, match="of another model"):
        load_tokenizer(str(llama_file))


@pytest.mark.parametrize("kind", ["array", "text"])
def test_a_header_that_promises_more_than_there_is(llama_file: Path, kind: str) -> None:
    """A count or a length beyond the file is refused at once, not filled up until the memory is."""
    raw = bytearray(llama_file.read_bytes())
    if kind == "array":
        name = b"tokenizer.ggml.token_type"
        at = raw.index(name) + len(name) + 4 + 4  # after the kinds of the value and of its items
    else:
        name = b"general.name"
        at = raw.index(name) + len(name) + 4
    raw[at : at + 8] = (2**40).to_bytes(8, "little")
    llama_file.write_bytes(raw)
    with pytest.raises(InputError, match=r"tiny\.gguf is truncated or damaged"):
        gguf_file.read_header(llama_file)


@pytest.mark.parametrize(
    ("extra", "error", "reason"),
    [
        ({"expert_count": "many"}, InputError, r"m\.gguf is truncated or damaged .*'many'"),
        ({"name": "mamba"}, UnsupportedModelError, r"architecture 'mamba'.*llama"),
        ({"rope.scaling.factor": 4}, UnsupportedModelError, r"its rope is scaled \(linear\)"),
        ({"rope.scale_linear": 4}, UnsupportedModelError, r"its rope is scaled \(linear\)"),
        ({"rope.scaling.type": "yarn"}, UnsupportedModelError, r"its rope is scaled \(yarn\)"),
        ({"expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ({"split.count": 2}, InputError, "one part of 2; join them with llama-gguf-split --merge"),
    ],
)
def test_details(extra: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path) -> None:
    """Text for a number, an unverified architecture, a part, and what transformers would leave out are refused by name."""
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), "llama", **extra)
    with pytest.raises(error, match=reason):
        Fusor.from_pretrained(str(path))


def test_a_rope_that_is_scaled_in_another_way(tmp_path: Path) -> None:
    """Factors that are not Llama 3's are refused."""
    model = tiny_checkpoint("llama-3")
    model.config.rope_parameters["high_freq_factor"] = 2.0
    with pytest.raises(UnsupportedModelError, match="not as Llama 3's is"):
        Fusor.from_pretrained(str(write_gguf(tmp_path / "m.gguf", model, "llama")))


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_a_truncated_file(kept: float, llama_file: Path) -> None:
    """A file that was cut anywhere is refused, and nothing of it is kept."""
    whole = llama_file.read_bytes()
    llama_file.write_bytes(whole[: max(8, int(len(whole) * kept))])
    with pytest.raises(InputError, match="truncated or damaged"):
        Fusor.from_pretrained(str(llama_file))
    assert all(path.suffix == ".lock" for path in converted_folder("", "").parent.glob("*"))


def test_other_paths(llama_file: Path, tmp_path: Path) -> None:
    """A file of another kind, no file at all, and a folder in place of the file in it are refused by name."""
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 something else")
    for path, message in (
        (tmp_path / "m.gguf", "not a GGUF file"),
        (tmp_path / "none.gguf", "there is no file"),
        (llama_file.parent, r"name the GGUF file itself, such as .*m\.gguf"),
    ):
        with pytest.raises(InputError, match=message):
            Fusor.from_pretrained(str(path))


def test_missing_packages(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the packages that read GGUF the error names what to install."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[gguf\]'"):
        Fusor.from_pretrained(str(llama_file))


def test_a_conversion_has_a_price(llama_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Disk, memory and minutes stand in the log before the work begins, which a disk that is too full ends there."""
    weights = sum(each.numel() for each in tiny_checkpoint("llama").parameters())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(InputError, match=r"in about 1 min are needed, and 0\.0 GB are free.*XDG_CACHE_HOME"):
            convert_gguf(llama_file)
    assert gguf_file.read_header(llama_file).weights == weights
    assert "0 M weights become 0.0 GB on disk and in memory" in caplog.text


def test_a_conversion_that_is_cut_off(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails half way, or that a killed process left, is no model, and the next one starts afresh."""

    def fails(folder: Path, *_: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "convert_into", fails)
        with pytest.raises(InputError, match=r"No space left.*XDG_CACHE_HOME"):
            convert_gguf(llama_file)
    folder = convert_gguf(llama_file)
    (folder / "origin.json").unlink()  # written last
    (folder.parent / f".{folder.name}.partial").mkdir()
    assert is_converted(convert_gguf(llama_file))
    assert not (folder.parent / f".{folder.name}.partial").exists()


def test_two_at_once(tmp_path: Path) -> None:
    """Of two that make the same folder one fills it, and the other finds it."""
    filled: list[int] = []

    def fill(number: int) -> None:
        with new_folder(tmp_path / "models" / "m") as partial:
            if partial is not None:
                filled.append(number)
                (partial / "origin.json").write_text("{}")

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert is_converted(tmp_path / "models" / "m")


def test_a_cache_that_cannot_be_written(llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache folder cannot be made the error names the remedy."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        Fusor.from_pretrained(str(llama_file))


def test_a_model_folder_of_that_name(tmp_path: Path) -> None:
    """A model folder whose name ends like a GGUF file is still a folder."""
    tiny_model("llama").save_pretrained(tmp_path / "m.gguf")
    assert Fusor.from_pretrained(str(tmp_path / "m.gguf")).model.config.model_type == "llama"


def test_every_end_of_a_text(tmp_path: Path) -> None:
    """The tokenizer's end ends an answer, too; a GGUF file's header names one: there all control tokens for it."""
    added = [("<|endoftext|>", True), ("<|im_end|>", True), ("<|im_start|>", True), ("<|end|>", False)]
    tokens = {place: AddedToken(content, special=special) for place, (content, special) in enumerate(added)}
    for name, ends in (("none", [1, 3]), (ORIGIN, [0, 1, 3])):
        (tmp_path / name).touch()
        model = SimpleNamespace(name_or_path=str(tmp_path), generation_config=SimpleNamespace(eos_token_id=1))
        add_end_tokens(model, SimpleNamespace(added_tokens_decoder=tokens, eos_token_id=3))
        assert model.generation_config.eos_token_id == ends


def test_weights_with_the_time_of_others(tmp_path: Path) -> None:
    """A file that was changed in place, its size and time kept, has another digest."""
    (path := tmp_path / "weights").write_bytes(b"old")
    before, stat = file_digest(path), path.stat()
    path.write_bytes(b"new")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(path) != before
