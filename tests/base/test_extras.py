"""The core without the optional packages: what needs none works, and the rest names its extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cacheblend.base.errors import MissingExtraError, needs_extra

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# What the extras bring; sklearn comes with sentence-transformers, and transformers uses it where it is.
OPTIONAL = (
    *("faiss", "sentence_transformers", "langchain_core", "threadpoolctl", "sklearn", "scipy"),
    *("fastapi", "starlette", "uvicorn", "prometheus_client", "matplotlib", "rouge_score", "gguf", "accelerate"),
)


def _without_optional(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter in which the optional packages cannot be found."""
    blocked = f"import sys\nfor name in {OPTIONAL!r}:\n    sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)


def test_the_core() -> None:
    """The method, the store and the loader import and work without any of them."""
    done = _without_optional(
        "import torch\n"
        "from cacheblend import ChunkKV, ChunkKey, FusionConfig, Fusor, KVStore, Segment, StoreConfig\n"
        "from cacheblend.loader import LoadingController\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,\n"
        "                                     num_attention_heads=2, num_key_value_heads=1))\n"
        "fusor = Fusor(model)\n"
        "kv = fusor.precompute([3, 4, 5], prefix_ids=(1,))\n"
        "fused = fusor.fuse([Segment([1]), Segment([3, 4, 5], kv), Segment([6, 7])], FusionConfig(recompute_ratio=1.0))\n"
        "full = model(torch.tensor([[1, 3, 4, 5, 6, 7]])).logits[0, -1]\n"
        "assert torch.allclose(fused.logits, full, atol=1e-5)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from cacheblend import Engine", "rag"),
        ("from cacheblend import Retriever", "rag"),
        ("import cacheblend.integrations.langchain", "langchain"),
        ("for name in ('faiss', 'sentence_transformers', 'threadpoolctl', 'sklearn', 'scipy'):\n"
         "    del sys.modules[name]\nfrom cacheblend.cli.main import main\nmain(['serve', '-mm', '--port=0'])", "server"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(code: str, extra: str) -> None:
    """An import that needs an extra fails with one that says how to install it."""
    done = _without_optional(code)
    assert done.returncode == 1
    assert f"pip install '.[{extra}]'" in done.stderr.splitlines()[-1]


def test_command_line() -> None:
    """The command line prints its help, and one line for a command whose extra is missing."""
    main = "from cacheblend.cli.main import main\n"
    assert _without_optional(f"{main}main(['--help'])").returncode == 0
    done = _without_optional(f"{main}main(['ask', 'Why?', '--model', 'x', '--store-dir', '.'])")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("is not installed; in the checkout run: pip install '.[rag]'")
    assert "Traceback" not in done.stderr


def test_own_faults_are_not_hidden() -> None:
    """A module of this package that is missing is a fault of this package."""
    with pytest.raises(ModuleNotFoundError, match="no_such") as caught, needs_extra("rag"):
        import cacheblend.no_such  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(caught.value, MissingExtraError)


def test_extras_are_there() -> None:
    """Every extra that the package names is one of pyproject.toml, and `all` is all that a user of the engine needs."""
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    whole = set(extras["all"][0].partition("[")[2].rstrip("]").split(","))
    apart = {"vllm", "ray", "llamaindex", "haystack"}
    assert extras.keys() - whole - {"rag"} == {"all", "dev", "docs", *apart}
    assert "cacheblend[rag]" in extras["server"]
