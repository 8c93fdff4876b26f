"""Training the reader: one step, its schedule, and when the curriculum moves on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.eval.world.question import QuestionClass
from cacheblend.eval.world.tokens import make_tokenizer

from .curriculum import STAGES, Stage
from .lesson import Batch
from .network import NetworkConfig, grow, make_network

_ROW_STEP = 512


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one class: questions asked, answered right, and expected right by guessing."""

    asked: int
    right: int
    guessed: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, every token of them."""
        return self.right / self.asked

    @property
    def guess(self) -> float:
        """The same share for a guesser who knows the relation and the context's answers to it."""
        return self.guessed / self.asked

    def __add__(self, other: Marks) -> Marks:
        return Marks(self.asked + other.asked, self.right + other.right, self.guessed + other.guessed)


def losses(
    network: LlamaForCausalLM, batch: Batch, *, chunks_apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss of the answers' tokens, of the context's tokens, and per answer token whether it was the likeliest.

    Returns:
        answer loss, context loss (both scalars), right_N (bool, the N answer tokens in order).
    """
    hidden_BSD = network.model(
        input_ids=batch.ids_BS,
        attention_mask={"full_attention": None},
        position_ids=batch.positions_BS,
        use_cache=False,
        layout=batch.layout(chunks_apart=chunks_apart),
    ).last_hidden_state
    wanted_BS = (batch.is_answer_BS | batch.is_context_BS)[:, 1:]
    hidden_ND = hidden_BSD[:, :-1][wanted_BS]
    count = len(hidden_ND)
    # Rounded up to whole steps of rows, for the reason that `batch` rounds lengths.
    hidden_ND = torch.nn.functional.pad(hidden_ND, (0, 0, 0, -count % _ROW_STEP))
    logits_NV = network.lm_head(hidden_ND)[:count].float()
    targets_N = batch.ids_BS[:, 1:][wanted_BS]
    loss_N = torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    answers_N = batch.is_answer_BS[:, 1:][wanted_BS]
    right_N = logits_NV.argmax(-1)[answers_N] == targets_N[answers_N]
    return loss_N[answers_N].mean(), loss_N[~answers_N].mean(), right_N


def mark(batch: Batch, right_N: torch.Tensor) -> dict[QuestionClass, Marks]:
    """Marks by class: an answer is right when each of its tokens, the EOS included, is the likeliest after those before."""
    is_right: dict[tuple[int, int], bool] = {}
    for (row, column), right in zip(batch.is_answer_BS.nonzero().tolist(), right_N.tolist(), strict=True):
        place = row, (column - batch.chunk_BC.shape[1]) // batch.question
        is_right[place] = is_right.get(place, True) and right
    marks: dict[QuestionClass, Marks] = {}
    for (row, index), right in is_right.items():
        lesson = batch.lessons[row]
        question = lesson.questions[index]
        one = Marks(1, int(right), lesson.guess[index])
        before = marks.get(question.question_class)
        marks[question.question_class] = one if before is None else before + one
    return marks


def add_marks(total: dict[QuestionClass, Marks], more: Mapping[QuestionClass, Marks]) -> None:
    """Adds marks to `total` in place."""
    for each, marks in more.items():
        total[each] = total[each] + marks if each in total else marks


# Classes that are asked because they teach, and need not be mastered: the reverse way comes long after the forward one.
_MEANS = frozenset({QuestionClass.REVERSE, QuestionClass.CLOZE, QuestionClass.BRIDGE, QuestionClass.ORDER})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Options of the reader's training.

    Attributes:
        seed: of weights and lessons.
        steps: optimizer steps of the whole run, its end included in the schedule.
        contexts: lessons a step.
        first_layers: decoder layers of the stages before `grow_at`; the network grows to its full depth there, keeping what it
            computes. The first circuits form in as many steps at half the depth, and a step takes half the time.
        grow_at: name of the stage that the network is grown for.
        matrix_rate: peak learning rate of Muon, for the layers' matrices.
        vector_rate: peak learning rate of AdamW, for embeddings and norms.
        warmup_steps: steps of linear warm-up.
        cooldown: share of the steps, at the end, over which the rates fall to zero.
        context_weight: weight of the language-model loss on the context beside that on the answers.
        rehearsal: share of steps that go back to an earlier stage, once two stages about articles are passed.
        recent_steps: the horizon of the accuracies that a stage is passed by.
    """

    seed: int = 0
    steps: int = 20_000
    contexts: int = 16
    first_layers: int = 4
    grow_at: str = "links"
    matrix_rate: float = 0.005
    vector_rate: float = 1e-2
    warmup_steps: int = 50
    cooldown: float = 0.3
    context_weight: float = 0.2
    rehearsal: float = 0.15
    recent_steps: int = 50

    def __post_init__(self) -> None:
        for field in ("steps", "contexts", "first_layers", "warmup_steps", "recent_steps"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")
        for field in ("cooldown", "context_weight", "rehearsal"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(field, getattr(self, field), "from 0 to 1")

    def rate(self, step: int, fresh_at: int = 0) -> float:
        """The share of the peak rates at a step counted from 1, optimizers fresh after step `fresh_at`: linear warm-up,
        plateau, linear cooldown.
        """
        left = (self.steps + 1 - step) / max(1.0, self.cooldown * self.steps)
        return max(0.0, min((step - fresh_at) / self.warmup_steps, 1.0, left))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step."""

    step: int
    stage: str
    answer_loss: float
    context_loss: float
    marks: Mapping[QuestionClass, Marks]


class Trainer:
    """The reader in training; its whole state is what `checkpoint` saves."""

    def __init__(self, config: TrainConfig, network: NetworkConfig, device: torch.device, stages: tuple[Stage, ...] = STAGES):
        self.config, self.network_config, self.device, self.stages = config, network, device, stages
        self.tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        first = replace(network, layers=min(config.first_layers, network.layers))
        self.use(make_network(first, self.tokenizer, config.seed))
        self.step = 0
        self.stage = 0
        self.grown_at = 0
        self.recent: dict[QuestionClass, float] = {}

    def start_from(self, network: LlamaForCausalLM, stage: str) -> None:
        """Goes on from a trained network of full depth, at a stage, with a fresh schedule.

        Raises:
            InputError: the network has another shape than the configured one, or there is no such stage.
        """
        names = [each.name for each in self.stages]
        if stage not in names:
            raise InputError(f"there is no stage {stage!r}; there are {', '.join(names)}")
        fresh = make_network(self.network_config, self.tokenizer, self.config.seed)
        try:
            fresh.load_state_dict(network.float().state_dict())
        except RuntimeError as error:
            raise InputError(f"the network to start from has another shape: {error}") from error
        self.stage = names.index(stage)
        self.use(fresh)

    @property
    def is_grown(self) -> bool:
        """Whether the network has its full depth."""
        names = [stage.name for stage in self.stages]
        return self.config.grow_at in names and self.stage >= names.index(self.config.grow_at)

    def use(self, network: LlamaForCausalLM) -> None:
        """Trains `network` from here on, with fresh optimizers."""
        torch.nn.Module.to(network, self.device)  # transformers wraps .to in a way that mypy cannot follow
        self.network = network.train()
        matrices = [weight for name, weight in network.named_parameters() if _is_matrix(name, weight)]
        vectors = [weight for name, weight in network.named_parameters() if not _is_matrix(name, weight)]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=self.config.matrix_rate, weight_decay=0.0),
            torch.optim.AdamW(vectors, lr=self.config.vector_rate, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def stage_of_step(self, step: int) -> Stage:
        """The stage that a coming step's lessons are of: the current one, or now and then an earlier one."""
        rng = random.Random(f"rehearsal/{self.config.seed}/{step}")
        lessons = [stage for stage in self.stages[: self.stage] if stage.recall is None]
        if len(lessons) > 1 and rng.random() < self.config.rehearsal:
            return rng.choice(lessons)
        return self.stages[self.stage]

    def train(self, batch: Batch, stage: Stage) -> StepReport:
        """One optimizer step on a batch of `stage`."""
        self.step += 1
        rates = (self.config.matrix_rate, self.config.vector_rate)
        for optimizer, peak in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.config.rate(self.step, self.grown_at)
        with torch.autocast(self.device.type, torch.bfloat16):
            answer_loss, context_loss, right_N = losses(self.network, batch.to(self.device))
        context_weight = 0.0 if stage.recall else self.config.context_weight  # a recall lesson's context is random words
        (answer_loss + context_weight * context_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        marks = mark(batch, right_N)
        if stage is self.stages[self.stage]:
            self._move_on(marks)
        return StepReport(self.step, stage.name, answer_loss.item(), context_loss.item(), marks)

    def _move_on(self, marks: Mapping[QuestionClass, Marks]) -> None:
        """Updates the recent accuracies; passes the stage when each class that counts has reached the mark."""
        weight = 1 / self.config.recent_steps
        for each, one in marks.items():
            if each in _MEANS:
                continue
            self.recent[each] = self.recent.get(each, 0.0) * (1 - weight) + one.accuracy * weight
        if min(self.recent.values()) >= self.stages[self.stage].pass_mark and self.stage + 1 < len(self.stages):
            self.stage += 1
            self.recent = {}
            if self.stages[self.stage].name == self.config.grow_at:
                self.use(grow(self.network, self.network_config, self.tokenizer, self.config.seed + 1))
                self.grown_at = self.step


def _is_matrix(name: str, weight: torch.nn.Parameter) -> bool:
    return weight.dim() == 2 and "embed" not in name
