"""The packaged reader: it reads across chunks, full reuse loses that, and blending brings it back."""

from __future__ import annotations

from pathlib import Path

from cacheblend.eval.data import WorldSource
from cacheblend.eval.run import EvalConfig, evaluate
from cacheblend.service.default_model import default_model

METHODS = ("full_recompute", "full_reuse", "blend", "blend_hkvd")


def test_blending_brings_back_what_reuse_loses(tmp_path: Path) -> None:
    """On unseen names: what an earlier chunk must tell is lost by full reuse, and read again at the default ratio.

    The documents' own context makes the difference: by the deviation at layer 1 alone, the same number of tokens helps little.
    """
    source = WorldSource(seed=1000, cases=32)
    summary = evaluate(EvalConfig(source=source, model=default_model(), methods=METHODS), tmp_path / "run")
    f1 = {method: {each: found["f1"] for each, found in summary["methods"][method].items()} for method in METHODS}
    assert f1["full_recompute"]["all"] >= 0.8
    assert f1["full_reuse"]["across"] <= f1["full_recompute"]["across"] - 0.15
    assert f1["blend"]["across"] >= f1["full_recompute"]["across"] - 0.13  # one of eight cases
    assert f1["blend"]["across"] > f1["blend_hkvd"]["across"]
    assert f1["blend"]["all"] >= f1["full_recompute"]["all"] - 0.05
