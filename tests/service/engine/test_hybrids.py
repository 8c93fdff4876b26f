"""Models with state-space or linear-attention layers are served exactly, after the longest prefix whose states are held."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION, prompt_of
from fakes import FakeEmbedder, tiny_tokenizer
from served import Client
from tiny_models import tiny_model

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import Fusor, Segment
from cacheblend.blend.hybrid import PIECE_TOKENS, HybridDecoder, HybridSequence
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Answer, Engine, EngineConfig
from cacheblend.service.engine.prompt import PromptTokens
from cacheblend.service.serving.scheduler import Scheduler
from cacheblend.store import BLOCK_TOKENS, PrefixRun

FAMILIES = (
    "qwen3-next",
    "qwen3-5",
    "granite-hybrid",
    "falcon-h1",
    "bamba",
    "lfm2",
    "nemotron-h",
    "kimi-linear",
    "zamba2",
    "olmo-hybrid",
)
HEAD, TURN, OTHER = tuple(range(100, 150)), tuple(range(200, 233)), tuple(range(300, 320))


def open_engine(folder: Path, family: str, **options: object) -> Engine:
    """An engine on a tiny model of a family."""
    tokenizer = tiny_tokenizer()
    config = EngineConfig(model="tiny", store_dir=folder, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS), **options)
    return Engine(config, fusor=Fusor(tiny_model(family, vocab=len(tokenizer)), tokenizer), embedder=FakeEmbedder())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with open_engine(tmp_path, "qwen3-next") as engine:
        yield engine


def ask(engine: Engine, layout: PromptTokens, method: str = "blend", **options: object) -> Answer:
    return engine.answer(QUESTION, layout=layout, method=method, **{"num_chunks": 0, "max_tokens": 20, **options})


def computed(answer: Answer) -> int:
    """Prompt tokens that ran through the layers."""
    (tokens,) = {len(positions) for positions in answer.plan.recomputed}
    return tokens


def check_exact(engine: Engine, answer: Answer) -> None:
    """Logits are the model's own, to rounding, and the tokens those of `generate`."""
    ids = torch.tensor([prompt_of(answer.plan)])
    model = engine.fusor.model
    (full_V,) = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(answer.first_logits, full_V, rtol=1e-4, atol=1e-4)
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=len(answer.token_ids))
    assert answer.token_ids == greedy[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_prefix_hit_answers_equal_full_recompute(family: str, tmp_path: Path) -> None:
    """The head's states serve another question, and the states after an answer the conversation's next turn."""
    with open_engine(tmp_path, family) as engine:
        first, other = ask(engine, PromptTokens(HEAD, TURN)), ask(engine, PromptTokens(HEAD, OTHER))
        turn = PromptTokens((*prompt_of(other.plan), *other.token_ids), TURN)
        following, full = ask(engine, turn), ask(engine, turn, "full_recompute")
        for answer in (first, other, following, full):
            check_exact(engine, answer)
        held = [48, (70 + 19) // BLOCK_TOKENS * BLOCK_TOKENS]  # of the head; of the prompt and the answer but its last token
        assert [computed(first), computed(other), computed(following)] == [83, 70 - held[0], 90 + 33 - held[1]]
        assert computed(full) == 90 + 33


@pytest.mark.parametrize("family", ["jamba", "minimax"])
def test_a_model_that_goes_on_by_one_token_alone_runs_all_of_each_prompt(family: str, tmp_path: Path) -> None:
    with open_engine(tmp_path, family) as engine:
        answers = [ask(engine, PromptTokens(HEAD, turn)) for turn in (TURN, TURN, OTHER)]
        assert [computed(answer) for answer in answers] == [83, 83, 70]
        for answer in answers:
            check_exact(engine, answer)


def test_a_state_that_is_not_copied_is_found_at_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """With planted faults no state is reused: one that is zero, keys without theirs, a sequence that forgets its place."""
    model, resume, extend = tiny_model("qwen3-next"), HybridDecoder.resume, HybridDecoder.extend

    def zeroed(self: HybridDecoder, run: PrefixRun | None) -> HybridSequence:
        sequence = resume(self, run)
        if sequence.cache is not None:
            sequence.cache.layers[0].recurrent_states[0].zero_()
        return sequence

    def shifted(self: HybridDecoder, sequence: HybridSequence, token_ids: Sequence[int]) -> torch.Tensor:
        sequence.tokens += bool(sequence.tokens)
        return extend(self, sequence, token_ids)

    assert Fusor(model).decoder.carries
    with monkeypatch.context() as patch:
        patch.setattr(HybridDecoder, "resume", zeroed)
        assert not Fusor(model).decoder.carries
    monkeypatch.setattr(HybridDecoder, "extend", shifted)
    with pytest.raises(UnsupportedModelError, match="do not go on from a state"):
        Fusor(model)


def test_calls_that_blend_say_why_not() -> None:
    fusor = Fusor(tiny_model("qwen3-next"))
    for call in (lambda: fusor.precompute([5, 6]), lambda: fusor.fuse([Segment([5, 6])])):
        with pytest.raises(UnsupportedModelError, match="linear-attention layers"):
            call()
    prefilled = fusor.prefill([5, 6, 7])
    assert fusor.generate(prefilled, 4) == fusor.generate(prefilled, 4)


def test_evicted_states_are_computed_anew(tmp_path: Path) -> None:
    with open_engine(tmp_path, "qwen3-next", prefix_budget_bytes=120_000) as engine:
        answers = [ask(engine, PromptTokens(tuple(range(at, at + 50)), TURN)) for at in (100, 150, 200, 100)]
        assert engine.prefixes.stats()["evictions"]
        assert computed(answers[-1]) == 83
        check_exact(engine, answers[-1])
        assert engine.prefixes.stats()["bytes"] <= 120_000


def test_long_prompts_run_in_pieces_whose_ends_are_reused(engine: Engine) -> None:
    """Another end finds the state that was held in the middle."""
    long = tuple(2 + at * 7 % 500 for at in range(2 * PIECE_TOKENS - 80))
    ask(engine, PromptTokens(HEAD, long))
    other = ask(engine, PromptTokens(HEAD, (*long[: PIECE_TOKENS + 20], *OTHER)))
    assert computed(other) == len(HEAD) + 20 + len(OTHER)
    check_exact(engine, other)


def test_ingested_documents_are_searched_and_their_kv_is_not_computed(engine: Engine) -> None:
    report = engine.ingest(DOCUMENTS)
    answer = engine.answer(QUESTION, num_chunks=3, max_tokens=5)
    assert report.added == len(DOCUMENTS)
    assert (report.computed, engine.store.stats().nvme.entries) == (0, 0)
    assert len(answer.chunks) == 3
    assert "linear-attention" in answer.as_dict()["plan"]["exact_reason"]
    check_exact(engine, answer)


def test_sequences_that_decode_together_do_not_mix_states(engine: Engine) -> None:
    layouts = [PromptTokens(HEAD, tuple(range(at, at + 30 + at % 7))) for at in (200, 211, 222, 233)]
    alone = [ask(engine, layout, "full_recompute").token_ids for layout in layouts]
    with Scheduler(engine.fusor) as scheduler:
        requests = [engine.prepare(QUESTION, layout=layout, num_chunks=0, max_tokens=20) for layout in layouts]
        requests.append(requests[0].follow(1))
        clients = [Client(None) for _ in requests]
        for request, client in zip(requests, clients, strict=True):
            request.deliver = client.deliver
            scheduler.submit(request)
        together = [client.result().answer.token_ids for client in clients]
    assert together == [*alone, alone[0]]


def test_salts_share_no_states(engine: Engine) -> None:
    answers = [ask(engine, PromptTokens(HEAD, TURN), cache_salt=salt) for salt in ("a", "b", "a")]
    assert [computed(answer) for answer in answers] == [83, 83, 83 - 80]
