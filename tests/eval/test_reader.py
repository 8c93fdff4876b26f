"""The packaged reader: it reads across chunks, full reuse loses that, and blending brings it back."""

from __future__ import annotations

from pathlib import Path

from cacheblend.eval.data import WorldSource
from cacheblend.eval.run import EvalConfig, evaluate
from cacheblend.service.cli.model import default_model

METHODS = ("full_recompute", "full_reuse", "blend", "blend_hkvd")
ONE_OF_EIGHT = 0.13  # cases of a class


def test_context_and_blending_bring_back_what_reuse_loses(tmp_path: Path) -> None:
    """On unseen names: what an earlier chunk must tell is lost by full reuse of KV computed after BOS alone.

    KV computed after the document's earlier text has it; and over the other KV blending at the default ratio reads it again
    where the question attends, which the same number of tokens by the deviation at layer 1 does not.
    """
    source = WorldSource(seed=1000, cases=32)
    config = EvalConfig(source=source, model=default_model(), methods=METHODS, contexts=("default", "bos"))
    summary = evaluate(config, tmp_path / "run")
    f1 = {method: {each: found["f1"] for each, found in of.items()} for method, of in summary["methods"].items()}
    full = f1["full_recompute"]
    assert full["all"] >= 0.8
    assert f1["full_reuse+bos"]["across"] <= full["across"] - 0.15
    assert f1["full_reuse"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert f1["blend+bos"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert f1["blend+bos"]["across"] > f1["blend_hkvd+bos"]["across"]
    assert f1["blend"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert f1["blend"]["all"] >= full["all"] - 0.05
