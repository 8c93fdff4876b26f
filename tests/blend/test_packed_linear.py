"""Packed linear layers are the model's own."""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from cacheblend.blend import Fusor, cpu_modules
from cacheblend.blend.attention import FEATURES
from cacheblend.blend.compiled_file import has_feature

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and any(map(has_feature, FEATURES))),
    reason="this processor has no 16-bit matrix instructions",
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
@torch.no_grad()
def test_equals_plain(rows: int, *, bias: bool) -> None:
    """A packed layer gives what the layer gives, whose parameters it shares."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96, bias=bias)).to(torch.bfloat16)
    twin = cpu_modules.packed(plain)
    inputs = torch.randn(1, rows, 64).to(torch.bfloat16)
    torch.testing.assert_close(twin(inputs), plain(inputs), rtol=1e-2, atol=1e-2)
    assert type(plain[0]) is nn.Linear
    assert twin[0].plain.weight is plain[0].weight


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of 32 bits, and those that would take too much of the memory, are left as they are; logits agree."""
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    assert not cpu_modules.is_worth_packing(tiny_model("llama"))
    packed = Fusor(model)
    monkeypatch.setattr(cpu_modules, "MEMORY_PART", 1e-9)
    assert not cpu_modules.is_worth_packing(model)
    plain = Fusor(model)
    packed_layers = [
        any(isinstance(m, cpu_modules.PackedLinear) for m in f.decoder.layers[0].modules()) for f in (packed, plain)
    ]
    assert packed_layers == [True, False]
    rows = torch.randn(1, 9, 64).to(torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(packed.decoder.project_kv(1, rows), plain.decoder.project_kv(1, rows), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(packed.decoder.logits(rows), plain.decoder.logits(rows), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "max\n", "memory.max": "3000\n"}, 1000),
        ("0::/not/seen/from/here\n", {"memory.max": "2000\n"}, 2000),
        ("0::/\n", {}, None),
        (None, {}, None),
    ],
)
def test_memory_of_a_container(
    group: str | None, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is what the control group leaves; the machine's without a limit."""
    machine = cpu_modules.memory_bytes()
    monkeypatch.setattr(cpu_modules, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpu_modules, "CGROUP_OF_PROCESS", tmp_path / "group")
    if group is not None:
        (tmp_path / "group").write_text(group)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_modules.memory_bytes() == (machine if limit is None else limit)
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    assert cpu_modules.is_worth_packing(model) == (limit is None)
