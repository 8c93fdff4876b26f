"""Trained weights: reuse after the beginning-of-sequence token alone loses most, context and blending bring it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeEmbedder

from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.eval.data import DocumentsSource, Preset
from cacheblend.eval.handbook import handbook_documents, handbook_questions
from cacheblend.eval.run.folder import EvalConfig
from cacheblend.eval.run.runner import evaluate


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_context_and_blending_bring_back_what_reuse_loses(
    real_model: Callable[[str], Path], embedder: FakeEmbedder, tmp_path: Path
) -> None:
    """By the first token's KL from full recompute, over chapters of the handbook."""
    questions = [question for question in handbook_questions() if question.question_class == "one_place"][:3]
    wanted = {name for question in questions for name in question.gold}
    for document in handbook_documents():
        if document["id"] in wanted:
            (tmp_path / "handbook").mkdir(exist_ok=True)
            (tmp_path / "handbook" / document["id"]).write_text(document["text"])
    (tmp_path / "questions.txt").write_text("\n".join(question.question for question in questions))
    preset = Preset(chunk_tokens=128, top_k=4)
    source = DocumentsSource(
        documents=str(tmp_path / "handbook"), questions=str(tmp_path / "questions.txt"), preset=preset, worked_examples=False
    )
    config = EvalConfig(
        source=source,
        model=str(real_model(DEFAULT_MODEL)),
        methods=("full_recompute", "full_reuse", "blend"),
        contexts=("default", "bos"),
        max_new_tokens=2,
    )
    methods = evaluate(config, tmp_path / "run", embedder=embedder)["methods"]
    kl_nats = {label: result["first_token_kl_nats"] for label, result in methods.items()}
    assert kl_nats["full_recompute"] == pytest.approx(0, abs=1e-6)
    assert kl_nats["blend"] < kl_nats["full_reuse"] < kl_nats["full_reuse+bos"]
    assert kl_nats["blend"] < kl_nats["blend+bos"] < kl_nats["full_reuse+bos"]
    assert kl_nats["blend"] < 0.1
