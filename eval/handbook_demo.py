"""A pretrained model asked about the handbook: answers, TTFT and nearness to full recompute, method by method."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from cacheblend.blend import FusionResult
from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.eval.data.source import OWN_QUESTION, answer_ids
from cacheblend.eval.methods import rows_run
from cacheblend.eval.metrics import answer_nll_nats, equal_greedy_tokens, f1, likeliest_answer, normalize
from cacheblend.eval.run.folder import has_random_weights
from cacheblend.service import Answer, Engine

from .handbook import HandbookQuestion, QuestionClass

METHODS = ("full_recompute", "full_reuse", "blend")
CLASSES: tuple[QuestionClass, ...] = get_args(QuestionClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One method's answer to one question.

    Args:
        text: the first line that was generated.
        f1: word F1 against the best of the right answers.
        has_answer: the text contains a right answer, at word borders.
        ttft_s: see `Timings`.
        first_token_kl_nats: KL of the first token's distribution from full recompute's.
        gold_nll_over_full_nats: how much less likely the right answer is than after full recompute, in nats; of several right
            answers the one that full recompute finds likeliest.
        equal_greedy_tokens: share of full recompute's first tokens that the method generates too.
        recomputed_share: tokens that ran through a layer, in the mean over layers 1 and up, over those of the prompt.
    """

    text: str
    f1: float
    has_answer: bool
    ttft_s: float
    first_token_kl_nats: float
    gold_nll_over_full_nats: float
    equal_greedy_tokens: float
    recomputed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedQuestion:
    """A question, the tokens of its prompt, and every method's reply."""

    question: HandbookQuestion
    prompt_tokens: int
    replies: Mapping[str, Reply]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        own = asdict(self.question)
        own["class"] = own.pop("question_class")
        methods = {method: asdict(reply) for method, reply in self.replies.items()}
        return {**own, "prompt_tokens": self.prompt_tokens, "methods": methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSummary:
    """One method over all questions: means of its replies' values, and the median TTFT.

    Args:
        answer_share: questions whose reply has a right answer, 0..1.
        answer_share_by_class: that share among the questions of each class.
        f1: see `Reply`.
        ttft_s_median: see `Reply`.
        speedup: full recompute's median TTFT over this one's.
        first_token_kl_nats: see `Reply`.
        gold_nll_over_full_nats: see `Reply`.
        equal_greedy_tokens: see `Reply`.
        recomputed_share: see `Reply`.
    """

    answer_share: float
    answer_share_by_class: Mapping[str, float]
    f1: float
    ttft_s_median: float
    speedup: float
    first_token_kl_nats: float
    gold_nll_over_full_nats: float
    equal_greedy_tokens: float
    recomputed_share: float


def chosen_questions(questions: Sequence[HandbookQuestion], count: int) -> list[HandbookQuestion]:
    """Choose `count` questions at even distances, or all if there are fewer, so that every class is among them."""
    count = min(count, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def ask_handbook(engine: Engine, questions: Sequence[HandbookQuestion], *, num_chunks: int) -> Iterator[AskedQuestion]:
    """Ask every question by every method, after one unmeasured token of each.

    No method profits from a run before it: they take turns at going first, what prompts begin with is forgotten after each
    run, and a run that is not measured brings the KV of the question's chunks into RAM.

    Args:
        engine: has the handbook ingested.
        questions: at least one.
        num_chunks: chunks to retrieve for each.
    """
    ratios: dict[str, Any] = {"recompute_ratio": blended_ratio(engine), "max_loss_nats": engine.config.fusion.max_loss_nats}
    for method in METHODS:
        engine.answer(questions[0].question, num_chunks=num_chunks, method=method, max_tokens=1, **ratios)
    engine.drain()
    for index, item in enumerate(questions):
        start = index % len(METHODS)
        answers: dict[str, tuple[Answer, FusionResult]] = {}
        engine.answer(item.question, num_chunks=num_chunks, method="full_reuse", max_tokens=1)
        for method in METHODS[start:] + METHODS[:start]:
            engine.prefixes.clear()
            request = engine.prepare(item.question, num_chunks=num_chunks, method=method, **ratios)
            answers[method] = engine.complete(request), request.fused
        yield _compare(engine, item, answers)


def blended_ratio(engine: Engine) -> float | None:
    """Return the ratio that `blend` is compared at: without a profile it is explicit, so that short prompts are blended too."""
    if engine.controller is not None or engine.config.recompute_ratio is not None:
        return engine.config.recompute_ratio
    return engine.config.loader.quality_ratio


def _compare(engine: Engine, item: HandbookQuestion, answers: Mapping[str, tuple[Answer, FusionResult]]) -> AskedQuestion:
    full_answer, full = answers["full_recompute"]
    found = likeliest_answer(engine.fusor, full, [answer_ids(engine.prompts, answer) for answer in item.answers])
    assert found is not None, "the handbook's questions have answers"
    full_nll, gold = found
    replies = {}
    for method in METHODS:
        answer, fused = answers[method]
        text = OWN_QUESTION.answer_in(answer.text)
        replies[method] = Reply(
            text=text,
            f1=f1(text, item.answers),
            has_answer=has_answer(text, item.answers),
            ttft_s=answer.timings.ttft_s,
            first_token_kl_nats=first_token_kl_nats(full.logits, fused.logits),
            gold_nll_over_full_nats=answer_nll_nats(engine.fusor, fused, gold) - full_nll,
            equal_greedy_tokens=equal_greedy_tokens(full_answer.token_ids, answer.token_ids),
            recomputed_share=rows_run(fused) / len(fused.token_ids),
        )
    return AskedQuestion(question=item, prompt_tokens=len(full.token_ids), replies=replies)


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether a text contains one of the answers at word borders, both normalized as for F1."""
    said = f" {normalize(text)} "
    return any(f" {normalize(answer)} " in said for answer in answers)


def summarize(asked: Sequence[AskedQuestion]) -> dict[str, MethodSummary]:
    """Sum up every method; a class without a question is left out."""
    full_s = statistics.median(each.replies["full_recompute"].ttft_s for each in asked)
    return {method: _summary(asked, method, full_s) for method in METHODS}


def _summary(asked: Sequence[AskedQuestion], method: str, full_s: float) -> MethodSummary:
    replies = [each.replies[method] for each in asked]
    by_class: dict[str, float] = {}
    for name in CLASSES:
        own = [each.replies[method].has_answer for each in asked if each.question.question_class == name]
        if own:
            by_class[name] = statistics.fmean(own)
    ttft_s = statistics.median(reply.ttft_s for reply in replies)
    return MethodSummary(
        answer_share=statistics.fmean(reply.has_answer for reply in replies),
        answer_share_by_class=by_class,
        f1=statistics.fmean(reply.f1 for reply in replies),
        ttft_s_median=ttft_s,
        speedup=full_s / ttft_s,
        first_token_kl_nats=statistics.fmean(reply.first_token_kl_nats for reply in replies),
        gold_nll_over_full_nats=statistics.fmean(reply.gold_nll_over_full_nats for reply in replies),
        equal_greedy_tokens=statistics.fmean(reply.equal_greedy_tokens for reply in replies),
        recomputed_share=statistics.fmean(reply.recomputed_share for reply in replies),
    )


def closing_note(engine: Engine, asked: Sequence[AskedQuestion], methods: Mapping[str, MethodSummary]) -> str:
    """Say in a few sentences what the numbers show."""
    if has_random_weights(engine.fusor):
        return "The model's weights are random: its words and what is measured of answers mean nothing; compare times here."
    full, reuse, blend = (methods[name] for name in METHODS)
    cases = len(asked)
    right, reuse_right, blend_right = (round(each.answer_share * cases) for each in (full, reuse, blend))
    note = (
        f"Of {cases} questions full recompute has {right} right, full reuse {reuse_right}, blend {blend_right}. "
        f"Blend's first token needs {1 / blend.speedup:.0%} of full recompute's time, full reuse's {1 / reuse.speedup:.0%}."
    )
    is_nearer = blend.first_token_kl_nats <= reuse.first_token_kl_nats
    nearer, other = ("blend", "full reuse") if is_nearer else ("full reuse", "blend")
    note += f" By the first token's KL {nearer} is nearer to full recompute than {other}."
    if full.answer_share < 0.5:
        note += " The model itself misreads more than half of them: no method repairs what full recompute gets wrong."
    return note
