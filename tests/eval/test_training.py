"""Training the reader: lessons equal separate prompts, reuse is what it says, and a resumed run is the same run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.eval.world.tokens import make_tokenizer
from train_reader.checkpoint import export_reader, load_checkpoint, load_reader, save_checkpoint
from train_reader.curriculum import STAGES, draw_batch
from train_reader.lesson import Batch
from train_reader.network import NetworkConfig, grow, make_network
from train_reader.trainer import TrainConfig, Trainer, losses, mark

TOKENIZER = make_tokenizer()
TINY = NetworkConfig(width=16, mlp_width=16, layers=4, heads=2)
CPU = torch.device("cpu")
QUICK = tuple(replace(stage, pass_mark=0.0 if index < 5 else 2.0) for index, stage in enumerate(STAGES))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return draw_batch(TOKENIZER, replace(STAGES[8], questions=4), seed="t", contexts=3)


@pytest.fixture(scope="module")
def network() -> LlamaForCausalLM:
    return make_network(TINY, TOKENIZER, seed=1).eval()


def _hidden(network: LlamaForCausalLM, batch: Batch, *, chunks_apart: bool) -> torch.Tensor:
    with torch.no_grad():
        return network.model(
            input_ids=batch.ids_BS,
            attention_mask={"full_attention": None},
            position_ids=batch.positions_BS,
            use_cache=False,
            layout=batch.layout(chunks_apart=chunks_apart),
        ).last_hidden_state


@pytest.fixture(scope="module")
def plain(network, tmp_path_factory) -> LlamaForCausalLM:
    """The same weights with transformers' own attention."""
    folder = tmp_path_factory.mktemp("reader")
    export_reader(network, TOKENIZER, folder, torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def test_each_question_of_a_lesson_reads_as_its_own_prompt_would(batch, network, plain):
    hidden_BSD = _hidden(network, batch, chunks_apart=False)
    context = batch.chunk_BC.shape[1]
    for row, lesson in enumerate(batch.lessons):
        used = 1 + sum(map(len, lesson.chunks))
        for index, (prompt, answer) in enumerate(zip(lesson.prompts, lesson.answers, strict=True)):
            at, size = context + index * batch.question, len(prompt) + len(answer) + 1
            picked = [*range(used), *range(at, at + size)]
            with torch.no_grad():
                alone_1SD = plain.model(
                    input_ids=batch.ids_BS[row, picked][None], position_ids=batch.positions_BS[row, picked][None]
                ).last_hidden_state
            torch.testing.assert_close(alone_1SD[0, -size:], hidden_BSD[row, at : at + size], rtol=1e-4, atol=1e-5)


def test_with_chunks_apart_a_chunk_reads_as_it_would_alone_behind_the_bos(batch, network, plain):
    hidden_BSD = _hidden(network, batch, chunks_apart=True)
    for row, lesson in enumerate(batch.lessons):
        at = 1
        for chunk in lesson.chunks:
            picked = [0, *range(at, at + len(chunk))]
            with torch.no_grad():
                alone_1SD = plain.model(
                    input_ids=batch.ids_BS[row, picked][None], position_ids=batch.positions_BS[row, picked][None]
                ).last_hidden_state
            torch.testing.assert_close(alone_1SD[0, 1:], hidden_BSD[row, at : at + len(chunk)], rtol=1e-4, atol=1e-5)
            at += len(chunk)


def test_positions_stay_below_the_longest_and_gaps_only_widen_them(batch):
    assert int(batch.positions_BS.max()) < 2048
    for row, lesson in enumerate(batch.lessons):
        used = 1 + sum(map(len, lesson.chunks))
        steps = batch.positions_BS[row, 1:used] - batch.positions_BS[row, : used - 1]
        assert bool((steps >= 1).all())


def test_marks_count_an_answer_right_only_with_every_token(batch, network):
    _, _, right_N = losses(network, batch)
    asked = sum(len(lesson.questions) for lesson in batch.lessons)
    for right, expected in ((torch.ones_like(right_N), asked), (torch.zeros_like(right_N), 0)):
        marks = mark(batch, right).values()
        assert sum(one.asked for one in marks) == asked
        assert sum(one.right for one in marks) == expected


def test_a_grown_network_computes_what_the_shallow_one_did(batch, network):
    deep = grow(network, replace(TINY, layers=8), TOKENIZER, seed=2).eval()
    assert deep.config.num_hidden_layers == 8
    before, after = (_hidden(each, batch, chunks_apart=False) for each in (network, deep))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def _step(trainer: Trainer) -> tuple[float, float]:
    stage = trainer.stage_of_step(trainer.step + 1)
    report = trainer.train(draw_batch(trainer.tokenizer, stage, seed=f"0/{trainer.step + 1}", contexts=2), stage)
    return report.answer_loss, report.context_loss


def test_a_run_resumed_from_a_checkpoint_is_the_same_run_bit_for_bit(tmp_path):
    config = TrainConfig(steps=6, contexts=2, warmup_steps=2, first_layers=2, grow_at="more pairs")
    trainer = Trainer(config, TINY, CPU, QUICK)
    _step(trainer)
    save_checkpoint(trainer, tmp_path / "early")
    _step(trainer)
    save_checkpoint(trainer, tmp_path / "grown")
    rest = [_step(trainer) for _ in range(2)]
    assert trainer.network.config.num_hidden_layers == TINY.layers
    early, grown = (load_checkpoint(tmp_path / name, CPU, QUICK) for name in ("early", "grown"))
    _step(early)
    for resumed in (early, grown):
        assert [_step(resumed) for _ in range(2)] == rest
        for one, other in zip(resumed.network.parameters(), trainer.network.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_checkpoint_is_replaced_whole_and_holds_no_pickle(tmp_path):
    trainer = Trainer(TrainConfig(contexts=2), TINY, CPU)
    for _ in range(2):
        save_checkpoint(trainer, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert {path.suffix for path in (tmp_path / "run").iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 0


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a training checkpoint"):
        load_checkpoint(tmp_path / "nothing", CPU)


def test_the_default_reader_has_eight_layers_and_fits_the_package():
    default = make_network(NetworkConfig(), TOKENIZER, seed=0)
    assert default.config.num_hidden_layers >= 8
    assert 2 * sum(weight.numel() for weight in default.parameters()) <= 16 * 2**20


@pytest.mark.parametrize("changes", [{"width": 30, "heads": 4}, {"layers": 0}])
def test_a_network_of_impossible_size_is_refused(changes):
    with pytest.raises(ConfigError):
        NetworkConfig(**changes)


@pytest.mark.parametrize("changes", [{"steps": 0}, {"cooldown": 1.5}])
def test_a_training_of_impossible_length_is_refused(changes):
    with pytest.raises(ConfigError):
        TrainConfig(**changes)


def test_an_exported_reader_is_trained_further(tmp_path):
    trainer = Trainer(TrainConfig(contexts=2), TINY, CPU)
    trainer.start_from(make_network(TINY, TOKENIZER, seed=3), "she")
    export_reader(trainer.network, trainer.tokenizer, tmp_path / "reader", torch.float32)
    again = Trainer(TrainConfig(contexts=2), TINY, CPU)
    again.start_from(load_reader(tmp_path / "reader"), "long")
    assert again.stages[again.stage].name == "long"
    for one, other in zip(again.network.parameters(), trainer.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_started_from_is_refused(tmp_path):
    trainer = Trainer(TrainConfig(contexts=2), TINY, CPU)
    with pytest.raises(InputError, match="no reader"):
        load_reader(tmp_path)
    with pytest.raises(InputError, match="no stage 'nowhere'"):
        trainer.start_from(trainer.network, "nowhere")
    with pytest.raises(InputError, match="another shape"):
        trainer.start_from(make_network(replace(TINY, width=TINY.width * 2), TOKENIZER, seed=3), "she")
