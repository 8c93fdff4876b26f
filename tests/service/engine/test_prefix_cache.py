"""What a prompt begins with is reused exactly: system messages, and conversations so far with what was generated."""

from collections.abc import Iterator
from pathlib import Path

import model_families
import pytest
from engines import CHUNK_TOKENS, QUESTION, OpenEngine, furthest, kinds, prompt_of
from fakes import FakeEmbedder, tiny_tokenizer
from served import serve
from tiny_models import ROPE_BORDER, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionConfig, Fusor
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Answer, AnswerPlan, Engine, EngineConfig
from cacheblend.service.engine.prompt import Message, PromptRenderer, PromptTokens
from cacheblend.service.serving.scheduler import Scheduler
from cacheblend.store import BLOCK_TOKENS

FAMILIES = ("llama", "mistral-window", "gemma2", "gemma3")
SPECIAL = ["deepseek_v3", "gemma3n_text", "gemma4_text", "gpt_oss", "mimo_v2_flash", "smollm3"]  # whose windows are 24
SYSTEM = tuple(range(100, 150))
TURN = tuple(range(200, 233))
OTHER = tuple(range(300, 320))


def ask(engine: Engine, layout: PromptTokens, method: str = "prefix_cache", **options: object) -> Answer:
    return engine.answer(QUESTION, layout=layout, method=method, **{"num_chunks": 0, "max_tokens": 40, **options})


def blocks(tokens: int) -> int:
    """Tokens in full blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def cached(plan: AnswerPlan) -> int:
    """Tokens that brought their KV, as `usage` counts them."""
    return sum(len(segment.token_ids) for segment in plan.segments if segment.kind != "fresh")


def after(answer: Answer, turn: tuple[int, ...]) -> PromptTokens:
    """The next turn after a prompt and what was answered to it."""
    return PromptTokens((*prompt_of(answer.plan), *answer.token_ids), turn)


@pytest.fixture(params=[*FAMILIES, *SPECIAL])
def family_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine on a tiny model of a family; the windows are 12 tokens, below a block."""
    tokenizer = tiny_tokenizer()
    if request.param in SPECIAL and request.param not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {request.param}")
    if request.param in SPECIAL:
        sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
        fusor = Fusor(model_families.tiny_model(request.param, **sizes), tokenizer)
    else:
        fusor = Fusor(tiny_model(request.param, vocab=len(tokenizer)), tokenizer)
    config = EngineConfig(
        model="tiny",
        store_dir=tmp_path,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
        yield engine


def test_a_conversation(family_engine: Engine) -> None:
    """Each turn reuses all full blocks of the turns before, answers included, and is full recompute's, logits and tokens."""
    engine, layout = family_engine, PromptTokens(SYSTEM, TURN)
    expected = 0
    for turn in (OTHER, TURN, OTHER):
        answer = ask(engine, layout)
        full = ask(engine, layout, "full_recompute")
        assert cached(answer.plan) == expected
        assert furthest(answer, full) <= 1e-4
        assert answer.token_ids == full.token_ids
        assert all(int(positions[0]) == expected for positions in answer.plan.recomputed)
        expected = blocks(answer.plan.prompt_tokens + len(answer.token_ids) - 1)  # nobody has computed the last token's KV
        layout = after(answer, turn)
    assert kinds(ask(engine, layout)) == ["exact", "fresh", "fresh"]


def test_a_served_conversation(family_engine: Engine) -> None:
    """Served in batches, a turn's answer is put away token by token, and the next turn is still full recompute's."""
    engine = family_engine
    with Scheduler(engine.fusor) as scheduler:

        def turns(*layouts: PromptTokens) -> list[Answer]:
            options = {"num_chunks": 0, "method": "prefix_cache", "max_tokens": 40}
            clients = [serve(engine, scheduler, QUESTION, layout=layout, **options) for layout in layouts]
            return [client.result().answer for client in clients]

        first = turns(PromptTokens(SYSTEM, TURN), PromptTokens(SYSTEM, OTHER))
        second = turns(*(after(answer, TURN) for answer in first))
    for one, other in zip(first, second, strict=True):
        assert cached(other.plan) == blocks(one.plan.prompt_tokens + len(one.token_ids) - 1)
        full = ask(engine, after(one, TURN), "full_recompute")
        assert furthest(other, full) <= 1e-4
        assert other.token_ids == full.token_ids


def test_a_longrope(tmp_path: Path) -> None:
    """Prompts on one side of a longrope's border share blocks, those on the other do not; an answer may cross it."""
    tokenizer = tiny_tokenizer()
    fusor = Fusor(tiny_model("phi3-longrope", vocab=len(tokenizer)), tokenizer)
    config = EngineConfig(model="tiny", store_dir=tmp_path, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
        layout = PromptTokens((*SYSTEM, *SYSTEM), OTHER[: ROPE_BORDER - 110])
        crossing = ask(engine, layout)
        assert len(crossing.token_ids) == 40
        ids = [*layout.token_ids, *crossing.token_ids]
        own = [int(fusor.prefill(ids[:end]).logits.argmax()) for end in range(len(layout), len(ids))]
        assert own == crossing.token_ids
        for length, expected in ((120, 112), (140, 0), (150, 128)):
            prompt = PromptTokens(tuple(ids[:length]), ())
            answer, full = ask(engine, prompt, max_tokens=1), ask(engine, prompt, "full_recompute", max_tokens=1)
            assert cached(answer.plan) == expected
            assert furthest(answer, full) <= 1e-4


def test_a_prompt_that_leaves_another(family_engine: Engine) -> None:
    """A prompt that shares its beginning alone reuses its full blocks, also where windows have passed them since."""
    ask(family_engine, PromptTokens(SYSTEM, TURN))
    layout = PromptTokens(SYSTEM, OTHER)
    answer = ask(family_engine, layout)
    assert cached(answer.plan) == blocks(len(SYSTEM))
    assert furthest(answer, ask(family_engine, layout, "full_recompute")) <= 1e-4


def test_the_same_prompt_again(family_engine: Engine) -> None:
    """Of a prompt that was served before all full blocks are reused but for the last token's, whose logits are wanted."""
    for tokens in (47, 48, 49):
        layout = PromptTokens((), tuple(range(100, 100 + tokens)))
        first, second = (ask(family_engine, layout, max_tokens=1) for _ in range(2))
        assert cached(second.plan) == blocks(tokens - 1)
        assert furthest(first, second) <= 1e-4


def test_short_prompts(engine: Engine) -> None:
    """A prompt below a block neither hits nor misses."""
    for _ in range(2):
        answer = ask(engine, PromptTokens((), TURN[:16]), max_tokens=1)
        assert (answer.plan.hits, kinds(answer)) == (0, ["fresh"])


def test_salts(engine: Engine) -> None:
    """Requests of another salt find none of each other's blocks, by either method, and their own again."""
    layout = PromptTokens(SYSTEM, TURN)
    with Scheduler(engine.fusor) as scheduler:

        def reused(cache_salt: str, method: str) -> int:
            options = {"num_chunks": 0, "max_tokens": 2, "method": method}
            return cached(
                serve(engine, scheduler, QUESTION, cache_salt=cache_salt, layout=layout, **options).result().answer.plan
            )

        whole = blocks(len(SYSTEM) + len(TURN) - 1)
        for method in ("prefix_cache", "blend"):
            assert [reused(salt, method) for salt in ("", method, method, "")] == [whole * (method == "blend"), 0, whole, whole]


class TestBlend:
    """Prefix blocks beside blended chunks."""

    def test_a_system_message(self, engine: Engine) -> None:
        """In front of chunks the blocks of a head that was seen before are exact and outside the ratio; chunks are blended."""
        layout = PromptTokens(SYSTEM, TURN)
        first = ask(engine, layout, "blend", num_chunks=2)
        second = ask(engine, layout, "blend", num_chunks=2)
        assert kinds(first) == ["fresh", "reused", "reused", "fresh"]
        assert kinds(second) == ["exact", "fresh", "reused", "reused", "fresh"]
        assert len(second.plan.segments[0].token_ids) == blocks(len(SYSTEM))
        assert second.plan.reusable_tokens == first.plan.reusable_tokens
        assert (second.plan.hits, second.plan.misses) == (2, 0)
        assert furthest(first, second) <= 1e-4
        assert first.token_ids == second.token_ids

    @pytest.mark.parametrize("method", ["prefix_cache", "blend"])
    def test_a_blended_conversation(self, engine: Engine, method: str) -> None:
        """The next turn of a blended one finds the exact blocks before its chunks, none of blended KV: it is full prefill's."""
        first = ask(engine, PromptTokens(SYSTEM, TURN), "blend", num_chunks=2)
        layout = after(first, OTHER)
        answer = ask(engine, layout, method)
        assert kinds(answer)[0] == "exact"
        assert cached(answer.plan) == blocks(len(SYSTEM))
        assert furthest(answer, ask(engine, layout, "full_recompute")) <= 1e-4

    def test_what_no_later_turn_begins_with(self, engine: Engine) -> None:
        """Of a chat over chunks exact blocks alone are kept: the next turn's prompt does not begin with these chunks."""
        turns = [Message("system", "Answer in few words, and say so where the text does not tell."), Message("user", QUESTION)]
        layout = PromptRenderer(engine.fusor.tokenizer, engine.config.instruction).chat(turns, with_chunks=True)
        for _ in range(2):
            answer = ask(engine, layout, "blend", num_chunks=2)
            assert len(answer.token_ids) > BLOCK_TOKENS
            assert engine.prefixes.stats()["parts"] == len(layout.prefix) // BLOCK_TOKENS > 0
        assert kinds(answer) == ["exact", "fresh", "reused", "reused", "fresh"]


def test_a_small_budget(open_engine: OpenEngine) -> None:
    """Below a block nothing is kept and all is answered; a budget that is no positive whole number is refused."""
    engine = open_engine(prefix_budget_bytes=1)
    answers = [ask(engine, PromptTokens(SYSTEM, TURN)) for _ in range(2)]
    assert [cached(answer.plan) for answer in answers] == [0, 0]
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="prefix_budget_bytes"):
            open_engine(prefix_budget_bytes=wrong)
