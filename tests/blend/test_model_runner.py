"""Blending over a model that is not Hugging Face's, and over one that two processes share by heads."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import FusionConfig, FusionResult, Fusor, KVGeometry, LayerKV, Segment
from cacheblend.blend.attention import Rows, attend
from cacheblend.blend.interfaces import CosSin
from cacheblend.blend.layer_passes import QuestionPass, SharedPrefix

LAYERS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 5, 4, 8, 32, 97
SCALING = HEAD_DIM**-0.5


class PlainRunner:
    """A small transformer of its own: attention with rope and an MLP a layer, over the heads `first` to `last` of all.

    `reduce` adds up over the processes that hold the other heads.
    """

    def __init__(self, first: int = 0, last: int = HEADS, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        draw = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) * 1.5 / shape[-1] ** 0.5

        self.embedding, self.head = torch.randn(VOCABULARY, HIDDEN, generator=draw), weight(VOCABULARY, HIDDEN)
        own = slice(first * HEAD_DIM, last * HEAD_DIM)
        self.layers = []
        for _ in range(LAYERS):
            q, k, v, o = (weight(HEADS * HEAD_DIM, HIDDEN) for _ in range(4))
            self.layers.append((q[own], k[own], v[own], o.T[:, own], weight(2 * HIDDEN, HIDDEN), weight(HIDDEN, 2 * HIDDEN)))
        self.geometry = KVGeometry(LAYERS, last - first, HEAD_DIM, torch.float32, torch.device("cpu"))
        self.windows: list[int | None] = [None] * LAYERS
        self.layer_types: list[Hashable] = ["rope"] * LAYERS
        self.vocab_size, self._reduce = VOCABULARY, reduce
        self.max_positions: int | None = None

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        return self._reduce(heads_sum_N)

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids_S][None]

    def logits(self, hidden_1SM: torch.Tensor) -> torch.Tensor:
        return self.head @ _norm(hidden_1SM)[0, -1]

    def rotary(self, positions_N: torch.Tensor) -> Mapping[Hashable, CosSin]:
        angles_NX = positions_N[:, None] * 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        both = torch.cat([angles_NX, angles_NX], dim=-1)[None]
        return {"rope": (both.cos(), both.sin())}

    def rotate(self, layer: int, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        cos, sin = (x[:, None] for x in cos_sin)
        one, two = k_1HSD.chunk(2, dim=-1)
        return k_1HSD * cos + torch.cat([-two, one], dim=-1) * sin

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v, *_ = self.layers[layer]
        return self._heads(_norm(hidden_1SM) @ k.T), self._heads(_norm(hidden_1SM) @ v.T)

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, whole: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if scatter:
                whole.put(rows.on_device_S, k, v)
            return attend(q, whole.k_1HND, whole.v_1HND, rows, scaling=SCALING, window=None, softcap=None)

        return self._layer(layer, hidden_1SM, _at(cos_sin_N, rows.on_device_S), attention)

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            whole = question.update(k, v, layer)
            return question.attend(torch.nn.Identity(), q, *whole, None, scaling=SCALING)

        return self._layer(layer, hidden_1SM, _at(cos_sin_N, rows.on_device_S), attention)

    def run_isolated(
        self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert shared is None
        states = [self.embed(torch.tensor(ids)) for ids in sequences]
        for layer in range(LAYERS):
            pairs = [self.project_kv(layer, state) for state in states]
            yield torch.cat([k for k, _ in pairs], dim=2), torch.cat([v for _, v in pairs], dim=2)
            states = [self._dense(layer, state) for state in states]

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        return None

    def empty_cache(self) -> DynamicCache:
        return DynamicCache()

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits (V,) of the token after the prompt, by dense causal attention."""
        state = self.embed(torch.tensor(token_ids))
        for layer in range(LAYERS):
            state = self._dense(layer, state)
        return self.logits(state)

    def _dense(self, layer: int, hidden_1SM: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden_1SM.shape[1])

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return self._layer(layer, hidden_1SM, self.rotary(positions)["rope"], attention)

    def _layer(
        self, layer: int, hidden_1SM: torch.Tensor, cos_sin_S: CosSin, attention: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        q, k, v, o, up, down = self.layers[layer]
        normed = _norm(hidden_1SM)
        heads = [self._heads(normed @ x.T) for x in (q, k, v)]
        out_1SQD = attention(self.rotate(0, heads[0], cos_sin_S), self.rotate(0, heads[1], cos_sin_S), heads[2])
        hidden_1SM = hidden_1SM + self.reduce(out_1SQD.flatten(2) @ o.T)
        return hidden_1SM + torch.relu(_norm(hidden_1SM) @ up.T) @ down.T

    def _heads(self, x_1SX: torch.Tensor) -> torch.Tensor:
        return x_1SX.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def _at(cos_sin_N: CosSin, positions_S: torch.Tensor) -> CosSin:
    return cos_sin_N[0][:, positions_S], cos_sin_N[1][:, positions_S]


def _prompt(fusor: Fusor) -> list[Segment]:
    draw = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCABULARY, (count,), generator=draw).tolist() for count in (3, 24, 31, 17, 6)]
    head, *chunks, question = texts
    return [Segment(head), *(Segment(ids, fusor.precompute(ids, head)) for ids in chunks), Segment(question)]


def test_ratio_one_is_the_models_own_forward() -> None:
    """Over a runner of another kind, ratio 1.0 gives its own dense forward's logits, and a lower ratio does not."""
    runner = PlainRunner()
    fusor = Fusor.from_runner(runner, fingerprint="plain")
    fused = fusor.fuse(_prompt(fusor), FusionConfig(recompute_ratio=1.0))
    reference = runner.forward(fused.token_ids)
    assert float((fused.logits - reference).abs().max()) <= 1e-4
    less = fusor.fuse(_prompt(fusor), FusionConfig(recompute_ratio=0.1))
    assert float((less.logits - reference).abs().max()) > 1e-2
    with pytest.raises(UnsupportedModelError, match="prefills and generates itself"):
        fusor.generate(fused)


def test_layers_go_to_a_sink() -> None:
    """A sink gets every layer, finished, in the place of the cache."""
    fusor, taken = Fusor.from_runner(PlainRunner(), fingerprint="plain"), list[torch.Tensor]()
    segments = _prompt(fusor)
    steps = fusor.fuse_steps(
        segments, sink=SimpleNamespace(put=lambda layer, whole: taken.insert(layer, whole.kv_21HND.clone()))
    )
    blended = steps.run()
    cache = fusor.fuse(segments).cache
    assert len(taken) == LAYERS
    for kv_21HND, layer in zip(taken, cache.layers, strict=True):
        assert torch.equal(kv_21HND, torch.stack([layer.keys, layer.values]))
    assert not blended.logits.numel()
    assert not blended.cache.layers


@pytest.mark.parametrize("selector", ["question_attention", "gradual"])
def test_two_processes_select_the_same_tokens(selector: str) -> None:
    """Where two processes hold half of the heads each, both recompute the tokens that one with all heads does."""
    meet, parts = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2

    def all_reduce(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def add(x: torch.Tensor) -> torch.Tensor:
            parts[rank] = x
            meet.wait()
            total = parts[0] + parts[1]
            meet.wait()
            return total

        return add

    def blend(runner: PlainRunner) -> FusionResult:
        fusor = Fusor.from_runner(runner, fingerprint="plain")
        return fusor.fuse(_prompt(fusor), FusionConfig(recompute_ratio=0.2, selector=selector))

    whole = blend(PlainRunner())
    with ThreadPoolExecutor(2) as pool:
        halves = [PlainRunner(0, 2, all_reduce(0)), PlainRunner(2, 4, all_reduce(1))]
        both = list(pool.map(blend, halves))
    for half in both:
        assert all(torch.equal(mine, own) for mine, own in zip(half.recomputed, whole.recomputed, strict=True))
        assert float((half.logits - whole.logits).abs().max()) <= 1e-4
