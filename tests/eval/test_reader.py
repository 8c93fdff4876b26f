"""The packaged reader: it reads across chunks; full reuse of KV without context loses that, and blending brings it back."""

from __future__ import annotations

from pathlib import Path

from cacheblend.eval.data import WorldSource
from cacheblend.eval.run import EvalConfig, evaluate
from cacheblend.service.default_model import default_model

METHODS = ("full_recompute", "full_reuse", "blend", "blend_hkvd")


def test_blending_brings_back_what_reuse_loses(tmp_path: Path) -> None:
    """On unseen names: what an earlier chunk must tell is lost by full reuse, and read again at the default ratio.

    The question's attention makes the difference: by the deviation at layer 1 the same number of tokens helps little. Chunks
    that were computed after their document's earlier text lose next to nothing in the first place.
    """
    source = WorldSource(seed=1000, cases=32)
    config = EvalConfig(source=source, model=default_model(), methods=METHODS, contexts=("default", "bos"))
    found = evaluate(config, tmp_path / "run")["methods"]
    f1 = {label: {each: of_class["f1"] for each, of_class in classes.items()} for label, classes in found.items()}
    full = f1["full_recompute"]
    assert full["all"] >= 0.8
    assert f1["full_reuse+bos"]["across"] <= full["across"] - 0.5
    assert f1["blend+bos"]["across"] >= full["across"] - 0.13  # one of eight cases
    assert f1["blend+bos"]["all"] >= full["all"] - 0.05
    assert f1["blend+bos"]["across"] > f1["blend_hkvd+bos"]["across"]
    for method in ("full_reuse", "blend"):
        assert f1[method]["across"] >= full["across"] - 0.13
        assert f1[method]["all"] >= full["all"] - 0.05
    kl_nats = {label: classes["all"]["first_token_kl_nats"] for label, classes in found.items()}
    assert kl_nats["blend"] < kl_nats["full_reuse"] < kl_nats["full_reuse+bos"]
