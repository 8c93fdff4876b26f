"""The random model that demos and benchmarks run on."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from script_modules import load_script
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--intermediate", "48", "--vocab", "400"]
script = load_script("make_random_model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("models") / "tiny"
    assert script.main([str(out_dir), *TINY, "--chat-template"]) == 0
    return out_dir


def test_model_loads_and_generates(made: Path) -> None:
    """What was made loads offline by the Auto classes, has the asked shape, and generates."""
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads, config.vocab_size) == ("llama", 2, 2, 400)
    assert (model.dtype, len(tokenizer), tokenizer.bos_token_id) == (torch.float32, 400, 0)
    ids = tokenizer("hello", return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokenizer.bos_token_id
    assert model.generate(**ids, max_new_tokens=3).shape[1] <= ids["input_ids"].shape[1] + 3
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<s>[user]\nhi\n[assistant]\n"


@given(text=st.text() | st.sampled_from([" a 😀 漢字 e\u0301 don't , .  \r\n\x00</s>", "  x  "]))
@settings(deadline=None)
def test_tokenizer_gives_any_text_back(text: str) -> None:
    """Decoding what was encoded is the text, and no special token is added unless asked for."""
    tokenizer = script.train_tokenizer(script.python_help()[:20], script.ModelShape(vocab=300))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_same_seed_gives_the_same_files(made: Path, tmp_path: Path) -> None:
    """The same seed makes the same bytes, another seed other weights and the same tokenizer, and no random state is touched."""
    state = torch.get_rng_state()
    assert script.main([str(tmp_path / "same"), *TINY, "--chat-template"]) == 0
    assert script.main([str(tmp_path / "other"), *TINY, "--seed", "1"]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    for file in made.iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    weights, tokenizer = "model.safetensors", "tokenizer.json"
    assert (tmp_path / "other" / weights).read_bytes() != (made / weights).read_bytes()
    assert (tmp_path / "other" / tokenizer).read_bytes() == (made / tokenizer).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hidden", "30"], "hidden=30"),
        (["--kv-heads", "3"], "kv_heads=3"),
        (["--vocab", "100"], "vocab=100"),
        (["--layers", "0"], "layers=0"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    """What cannot be made is refused in one line with exit code 2, and nothing is written."""
    assert script.main([str(tmp_path / "out"), *TINY, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folder_with_files_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not empty is refused unless forced; a corpus too small for the vocabulary is refused too."""
    (tmp_path / "notes.txt").write_text("short")
    assert script.main([str(tmp_path), *TINY]) == 2
    assert "--force" in capsys.readouterr().err
    with pytest.raises(ValueError, match="smaller vocab"):
        script.train_tokenizer(["short"], script.ModelShape(vocab=400))
    assert script.main([str(tmp_path), *TINY, "--force"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "short"
