"""The packaged reader: it reads across chunks, full reuse loses that, and blending brings it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend.cli.model import default_model
from cacheblend.eval.data import WorldSource
from cacheblend.eval.data.request import Request
from cacheblend.eval.run.folder import EvalConfig
from cacheblend.eval.run.runner import evaluate

METHODS = ("full_recompute", "full_reuse", "blend", "blend_hkvd")
ONE_OF_EIGHT = 0.13  # cases of a class


class AcrossCases(WorldSource):
    """The cases whose answer rests on two chunks, a quarter of them."""

    @property
    def count(self) -> int:
        return self.cases // 4

    def requests(self, *arguments: Any, **options: Any) -> Iterator[Request]:
        return (request for request in super().requests(*arguments, **options) if request.example.category == "across")


def test_context_and_blending_bring_back_what_reuse_loses(tmp_path: Path) -> None:
    """On unseen names: what an earlier chunk must tell is lost by full reuse of KV computed after BOS alone.

    KV computed after the document's earlier text has it; and over the other KV blending at the default ratio reads it again
    where the question attends, which the same number of tokens by the deviation at layer 1 does not.
    """

    def f1(source: WorldSource, name: str, methods: tuple[str, ...], contexts: tuple[str, ...]) -> dict[str, dict[str, float]]:
        config = EvalConfig(source=source, model=default_model(), methods=methods, contexts=contexts)
        found = evaluate(config, tmp_path / name)["methods"]
        return {method: {each: values["f1"] for each, values in of.items()} for method, of in found.items()}

    every = f1(WorldSource(seed=1000, cases=32), "every", ("full_recompute", "blend"), ("default",))
    across = f1(AcrossCases(seed=1000, cases=32), "across", METHODS, ("default", "bos"))
    full = every["full_recompute"]
    assert full["all"] >= 0.8
    assert across["full_reuse+bos"]["across"] <= full["across"] - 0.15
    assert across["full_reuse"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert across["blend+bos"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert across["blend+bos"]["across"] > across["blend_hkvd+bos"]["across"]
    assert every["blend"]["across"] >= full["across"] - ONE_OF_EIGHT
    assert every["blend"]["all"] >= full["all"] - 0.05
