"""A blend: one prompt's walk through the layers, each on the tokens that the selector keeps (paper §4.2, §4.3).

Shapes: H KV heads, N tokens of the prompt, S rows that a layer runs, P of them at a time, C candidates
among them, D head size, M hidden size.
"""

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from .attention import Rows, Turn, row_kernel, upload
from .decoder import Decoder
from .interfaces import CosSin, LayerKV, LayerSink, LayerSource, ModelRunner
from .layer_passes import Question, QuestionPass, question_rows
from .prompt import FusionResult, LayerReport, Prompt
from .selectors import SelectionStep, Selector

# Rows of a check that are projected together: what they need stays near the caches.
PROJECTED_AT_ONCE = 512
# Positions at which the compiled rotation is compared with the model's.
COMPARED_KEYS = 16


class Fusion:
    """Runs a prompt through the decoder, each layer on the tokens that the selector keeps.

    If the selector reads the question's attention, the question's tokens first run over the stored KV, through all layers but
    the last, and score the tokens. The chosen tokens then run through every layer, layer 0 included.

    A selector that goes by KV deviation keeps all tokens at layer 0: their stored KV would be exact there as well, but its
    output is needed, so that layer 1's K and V can be projected fresh for all of them. Whatever was projected fresh stays. In
    the last layer the rows' K and V are projected, and only the prompt's last position goes through attention and MLP: no one
    reads the others' output.

    Without a `sink` the finished layers go to the cache of the result.

    Args:
        keeps_reuse: the question's pass goes through all layers, for `reuse_logits` and `repeat`.

    Attributes:
        layers: the finished ones, where they go to the cache of the result.
        reuse_logits: float32 (V,), of full reuse; None where they were not asked for, or no question was run.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompt: Prompt,
        selector: Selector,
        source: LayerSource,
        sink: LayerSink | None = None,
        *,
        keeps_reuse: bool = False,
    ) -> None:
        self._runner, self._prompt, self._selector, self._source, self._sink = runner, prompt, selector, source, sink
        self.layers, self._keeps_reuse = list[LayerKV](), keeps_reuse
        self.reuse_logits: Tensor | None = None
        self._deviation: tuple[Tensor, Tensor] | None = None  # the positions measured, and theirs on the device
        self._attention_LN = torch.zeros(1, len(prompt))  # of the question, from each layer on; 0: not asked
        self._bridge_N = torch.zeros(len(prompt), dtype=torch.bool)  # tokens that link chunks
        self._questions: list[LayerReport] = []
        self._turns: dict[Hashable, Turn] = {}  # by the kind of rotary embedding
        self._read: dict[int, LayerKV] = {}  # layers that the question pass has read, keys rotated, until they are run

    def steps(self) -> Generator[LayerReport, None, FusionResult]:
        """Run layer after layer; each yields its report."""
        runner, prompt, device = self._runner, self._prompt, self._runner.geometry.device
        self._token_ids_N = upload(torch.tensor(prompt.token_ids), device)
        self._rotary = runner.rotary(torch.arange(len(prompt), device=device))
        can_ask = prompt.reusable_tokens > 0 and runner.geometry.layers > 1
        if can_ask and getattr(self._selector, "reads_attention", False):
            # 1. The question's rows run over the stored KV, and score the tokens.
            self._source.start(prompt, runner.geometry, reuse_layer_0=True)
            yield from self._ask()
        return (yield from self._blend())

    def repeat(self, selector: Selector) -> Generator[LayerReport, None, FusionResult]:
        """Blend by another selector, with the question's scores and the KV as it was loaded; the first result is void."""
        for layer_kv, stored_21HRD in zip(self.layers, self._stored, strict=True):
            layer_kv.kv_21HND.index_copy_(3, self._stored_at_R, stored_21HRD)
        self._read, self.layers = dict(enumerate(self.layers)), []
        self._selector, self._keeps_reuse, self._deviation = selector, False, None
        return (yield from self._blend())

    def _blend(self) -> Generator[LayerReport, None, FusionResult]:
        """Run the chosen tokens layer after layer, over what the question pass read or what arrives now."""
        runner, prompt, device = self._runner, self._prompt, self._runner.geometry.device
        cache = CacheSink(runner)
        sink = self._sink or cache
        recomputed, projected, reports = list[Tensor](), list[Tensor](), list[LayerReport]()

        positions = torch.arange(prompt.exact_tokens, len(prompt))
        keep_S = self._choose(0, positions, _no_deviation_at_layer_0)
        reads_layer_0 = bool(self._read) or not bool(keep_S.all())  # a selector by KV deviation keeps all tokens there
        if not self._read:
            self._source.start(prompt, runner.geometry, reuse_layer_0=reads_layer_0)
        # 2. The chosen tokens run through every layer.
        self._rows = Rows.of(positions[keep_S], device)
        self._hidden_1SM = runner.embed(self._token_ids_N[self._rows.on_device_S])
        if self._keeps_reuse:
            self._stored_at_R = upload(positions[keep_S & prompt.reusable_N[positions]], device)
            self._stored = [layer_kv.kv_21HND.index_select(3, self._stored_at_R) for layer_kv in self._read.values()]
        for layer in range(runner.geometry.layers):
            # 3. The layer's stored KV: read by the question already, or waited for, its keys rotated to their positions.
            is_read = layer in self._read
            layer_kv, wait_s = (self._read.pop(layer), 0.0) if is_read else self._arrival(layer)
            arrived = time.perf_counter()
            cos_sin_N = self._rotary[runner.layer_types[layer]]
            if not is_read:
                self._rotate(layer, layer_kv, cos_sin_N, prompt.runs_to_rotate(exact_only=layer == 0 and not reads_layer_0))
            # 4. Fewer tokens go on, where the selector says so; K and V projected on the way stay.
            fresh_S, scatter = self._filter(layer, layer_kv, cos_sin_N) if layer > 0 else (self._rows.positions_S, True)
            rows = self._rows
            if 0 < layer == runner.geometry.layers - 1:  # nobody reads the others' output
                rows, scatter = self._keep_last(layer, layer_kv, cos_sin_N, is_projected=not scatter), False
            # 5. Attention and MLP of those tokens, against the layer's KV, with their own K and V in it.
            self._hidden_1SM = runner.run_rows(layer, self._hidden_1SM, rows, cos_sin_N, layer_kv, scatter=scatter)
            # 6. The finished layer goes to the cache, or to the caller's sink.
            sink.put(layer, layer_kv)
            if self._sink is None:
                self.layers.append(layer_kv)
            recomputed.append(self._rows.positions_S)
            projected.append(fresh_S)
            reports.append(LayerReport(layer, len(self._rows), wait_s, time.perf_counter() - arrived))
            yield reports[-1]

        return FusionResult(
            torch.empty(0) if self._sink is not None else self._logits(self._hidden_1SM, self.layers),
            cache.cache,
            prompt.token_ids,
            tuple(recomputed),
            tuple(projected),
            self._deviation_N(),
            prompt.reusable_tokens,
            prompt.exact_tokens,
            tuple(reports),
            cache.memory,
            tuple(self._questions),
        )

    def _keep_last(self, layer: int, layer_kv: LayerKV, cos_sin_N: CosSin, *, is_projected: bool) -> Rows:
        """Go on with the prompt's last position alone, once all rows' K and V are in the layer; returns its row."""
        if not is_projected:
            self._project(layer, layer_kv, cos_sin_N, self._rows, self._hidden_1SM)
        self._hidden_1SM = self._hidden_1SM[:, -1:]
        return self._rows.last

    def _logits(self, hidden_1SM: Tensor, layers: Sequence[LayerKV]) -> Tensor:
        """Logits (V,) of the last row, once it has run through the layers that keep no KV, each over an earlier layer's."""
        runner, row = self._runner, Rows.of(torch.tensor([len(self._prompt) - 1]), self._runner.geometry.device)
        for layer, source in enumerate(runner.geometry.shared, start=runner.geometry.layers):
            cos_sin_N, last_1SM = self._rotary[runner.layer_types[layer]], hidden_1SM[:, -1:]
            hidden_1SM = runner.run_rows(layer, last_1SM, row, cos_sin_N, layers[source], scatter=False)
        return runner.logits(hidden_1SM)

    def _deviation_N(self) -> Tensor:
        deviation_N = torch.zeros(len(self._prompt))
        if self._deviation is not None:  # not before the end: the host would wait for the layer
            deviation_N[self._deviation[0]] = self._deviation[1].cpu()
        return deviation_N

    def _arrival(self, layer: int) -> tuple[LayerKV, float]:
        """Wait for a layer's stored KV; returns it, and the seconds waited."""
        started = time.perf_counter()
        layer_kv = self._source.synchronize(layer)
        return layer_kv, time.perf_counter() - started

    def _ask(self) -> Generator[LayerReport, None, None]:
        """Run the question over the stored KV, and add up what it attends to in all layers but the last."""
        runner, prompt = self._runner, self._prompt
        rows = Rows.of(question_rows(prompt, reads_all=self._keeps_reuse), runner.geometry.device)
        question = Question(rows, prompt.fresh_N, runner.geometry.device)
        hidden_1SM = runner.embed(self._token_ids_N[rows.on_device_S])
        to_rotate = prompt.runs_to_rotate()
        scored = runner.geometry.layers - 1
        attention_LN = torch.zeros(scored, len(prompt), device=runner.geometry.device)
        reusable_N = upload(prompt.reusable_N, runner.geometry.device)
        for layer in range(scored + self._keeps_reuse):
            layer_kv, wait_s = self._arrival(layer)
            arrived = time.perf_counter()
            cos_sin_N = self._rotary[runner.layer_types[layer]]
            self._rotate(layer, layer_kv, cos_sin_N, to_rotate)
            layer_pass = QuestionPass(layer_kv, question, runner.windows[layer])
            hidden_1SM = runner.run_question(layer, hidden_1SM, rows, cos_sin_N, layer_pass)
            if 0 < layer < scored:  # layer 0's stored KV is exact
                attention_2N = runner.reduce(layer_pass.attention_2N)
                # A layer that looks elsewhere than at the reusable tokens counts as much, and the last row as much as all.
                on_reusable_21 = (attention_2N * reusable_N).sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
                attention_LN[layer] = (attention_2N / on_reusable_21).mean(0)
            self._read[layer] = layer_kv
            self._questions.append(LayerReport(layer, len(rows), wait_s, time.perf_counter() - arrived))
            yield self._questions[-1]
        summed_LN = attention_LN.flip(0).cumsum(0).flip(0).cpu()
        self._attention_LN, self._bridge_N = torch.cat([summed_LN, summed_LN[-1:]]), prompt.bridges_N()
        if self._keeps_reuse:
            self.reuse_logits = self._logits(hidden_1SM, list(self._read.values()))

    def _filter(self, layer: int, layer_kv: LayerKV, cos_sin_N: CosSin) -> tuple[Tensor, bool]:
        """Narrow the rows to those that this layer recomputes.

        Returns the positions whose K and V will be fresh in `layer_kv`, and whether the layer's run must write its own there.
        """
        before = self._rows
        projected = False

        def deviation_C() -> Tensor:
            nonlocal projected
            projected = True
            return self._compare(layer, layer_kv, cos_sin_N)

        keep_S = self._choose(layer, before.positions_S, deviation_C)
        if keep_S.all():
            return before.positions_S, not projected
        (chosen, chosen_1SM), (dropped, dropped_1SM) = (self._part(mask_S) for mask_S in (keep_S, ~keep_S))
        refreshes = getattr(self._selector, "refreshes_dropped", False) and not projected
        if refreshes:
            self._project(layer, layer_kv, cos_sin_N, dropped, dropped_1SM)
        self._rows, self._hidden_1SM = chosen, chosen_1SM
        return before.positions_S if projected or refreshes else chosen.positions_S, not projected

    def _part(self, mask_S: Tensor) -> tuple[Rows, Tensor]:
        """Some of the rows, and their hidden states."""
        device = self._runner.geometry.device
        rows = Rows.of(self._rows.positions_S[mask_S], device)
        return rows, self._hidden_1SM.index_select(1, upload(mask_S.nonzero()[:, 0], device))

    def _choose(self, layer: int, positions_S: Tensor, deviation_C: Callable[[], Tensor]) -> Tensor:
        """Mask (S,) of the rows that stay: all that are not reusable, the selector's choice, and the prompt's last."""
        reusable_S = self._prompt.reusable_N[positions_S]
        candidates_C = positions_S[reusable_S]
        step = SelectionStep(
            layer,
            self._runner.geometry.layers,
            self._prompt.reusable_tokens,
            candidates_C,
            deviation_C,
            self._attention_LN[min(layer, len(self._attention_LN) - 1), candidates_C],
            self._bridge_N[candidates_C],
            self._prompt.offset_N[candidates_C],
            len(positions_S) - len(candidates_C),
        )
        keep_S = ~reusable_S
        keep_S[reusable_S] = self._selector.select(step)
        keep_S[-1] = True  # the prompt's last position, whose output gives the logits
        return keep_S

    def _project(self, layer: int, layer_kv: LayerKV, cos_sin_N: CosSin, rows: Rows, hidden_1SM: Tensor) -> None:
        """Put fresh K and V of rows into the layer."""
        for at_P, k_1HPD, v_1HPD in self._fresh_kv(layer, cos_sin_N, rows, hidden_1SM):
            layer_kv.put(at_P, k_1HPD, v_1HPD)

    def _fresh_kv(
        self, layer: int, cos_sin_N: CosSin, rows: Rows, hidden_1SM: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Fresh K, rotated, and V (1, H, P, D) of rows, P at a time, and their positions (P,)."""
        for piece, hidden_1PM in zip(rows.split(PROJECTED_AT_ONCE), hidden_1SM.split(PROJECTED_AT_ONCE, dim=1), strict=True):
            at_P = piece.on_device_S
            k_1HPD, v_1HPD = self._runner.project_kv(layer, hidden_1PM)
            yield at_P, self._runner.rotate(layer, k_1HPD, (cos_sin_N[0][:, at_P], cos_sin_N[1][:, at_P])), v_1HPD

    def _compare(self, layer: int, layer_kv: LayerKV, cos_sin_N: CosSin) -> Tensor:
        """Put fresh K and V of all rows into the layer; returns the candidates' deviation (C,) from what stood there."""
        deviations: list[Tensor] = []
        for at_P, k_1HPD, v_1HPD in self._fresh_kv(layer, cos_sin_N, self._rows, self._hidden_1SM):
            stored_k_1HPD, stored_v_1HPD = (x_1HND.index_select(2, at_P) for x_1HND in (layer_kv.k_1HND, layer_kv.v_1HND))
            deviations.append(kv_deviation(k_1HPD, v_1HPD, stored_k_1HPD, stored_v_1HPD))
            layer_kv.put(at_P, k_1HPD, v_1HPD)
        deviation_S = self._runner.reduce(torch.cat(deviations))
        reusable_S = self._prompt.reusable_N[self._rows.positions_S]
        deviation_C = deviation_S.index_select(0, upload(reusable_S.nonzero()[:, 0], deviation_S.device))
        if self._deviation is None:
            self._deviation = self._rows.positions_S[reusable_S], deviation_C.clone()
        if reusable_S[-1]:
            deviation_C[-1] = torch.inf  # runs in any case, so it counts as the first of the chosen
        return deviation_C

    def _rotate(self, layer: int, layer_kv: LayerKV, cos_sin_N: CosSin, runs: list[tuple[int, int]]) -> None:
        """Turn the stored keys of these runs to the positions where they now stand."""
        turn = self._rotation(layer, layer_kv.k_1HND, cos_sin_N)
        for start, stop in runs:
            turn(layer_kv.k_1HND[:, :, start:stop], cos_sin_N[0][:, start:stop], cos_sin_N[1][:, start:stop])

    def _rotation(self, layer: int, k_1HND: Tensor, cos_sin_N: CosSin) -> Turn:
        """The compiled rotation for the layer's kind of rotary embedding, else the model's own."""
        kind = self._runner.layer_types[layer]
        if kind not in self._turns:
            kernel = row_kernel(k_1HND.dtype, k_1HND.device, k_1HND.shape[-1])
            few = cos_sin_N[0][:, -COMPARED_KEYS:], cos_sin_N[1][:, -COMPARED_KEYS:]
            compiled = None if kernel is None else kernel.rotation_of(partial(self._runner.rotate, layer), few, k_1HND)
            self._turns[kind] = compiled or partial(self._own_rotation, layer)
        return self._turns[kind]

    def _own_rotation(self, layer: int, k_1HTD: Tensor, cos_1TX: Tensor, sin_1TX: Tensor) -> None:
        k_1HTD.copy_(self._runner.rotate(layer, k_1HTD, (cos_1TX, sin_1TX)))


class CacheSink:
    """Puts finished layers into a `DynamicCache` without copying them; of a sliding layer only the last window.

    Attributes:
        cache: the prompt's KV cache, complete once all layers were put.
        memory: the layers' buffers, for `FusionResult.memory`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._windows, self.cache = runner.windows, runner.empty_cache()
        self._anatomy = runner.anatomy if isinstance(runner, Decoder) else None
        self.memory: list[Tensor | None] = []

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        """Put a finished layer into the cache."""
        pair, place, is_reordered = (layer_kv.k_1HND, layer_kv.v_1HND), layer, False
        if self._anatomy is not None:
            own = self._anatomy[layer]
            pair, place, is_reordered = own.unpack(*pair), own.cache_index, bool(own.is_packed or own.rotated)
        self.cache.update(pair[0][:, :, :0], pair[1][:, :, :0], place)
        target: Any = self.cache.layers[place]
        target.keys, target.values = pair
        if target.is_sliding:
            target.cumulative_length = layer_kv.k_1HND.shape[2]
            window_tokens = target.sliding_window - 1
            target.keys, target.values = (x[:, :, max(0, x.shape[2] - window_tokens) :].clone() for x in pair)
        self.memory.append(None if is_reordered or self._windows[layer] is not None else layer_kv.memory_21HCD)


class FusionSteps:
    """The layers of a fusion, run one a step; iterate it, then read `result`. Closing it ends the fusion early.

    Attributes:
        result: the blended prompt, once the last layer has run; `yield from` returns it too.
        preempted_s: seconds between two steps, in which the caller did something else.
    """

    result: FusionResult

    def __init__(self, steps: Generator[LayerReport, None, FusionResult]) -> None:
        self._steps, self._left_at = steps, 0.0
        self.preempted_s = 0.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LayerReport:
        if self._left_at:
            self.preempted_s += time.perf_counter() - self._left_at
        try:
            with torch.no_grad():
                report = next(self._steps)
        except StopIteration as done:
            self.result = done.value
            raise
        self._left_at = time.perf_counter()
        return report

    def close(self) -> None:
        """End the fusion, wherever it is."""
        self._steps.close()

    def run(self) -> FusionResult:
        """Run all steps that are left."""
        for _ in self:
            pass
        return self.result


def _no_deviation_at_layer_0() -> Tensor:
    raise RuntimeError("deviation is not known at layer 0: no token has run yet")


def kv_deviation(fresh_k_1HCD: Tensor, fresh_v_1HCD: Tensor, stored_k_1HCD: Tensor, stored_v_1HCD: Tensor) -> Tensor:
    """Squared difference of keys plus squared difference of values, a token, summed over H and D: float32 (C,).

    Keys are compared rotated to equal positions, with the rope's attention scaling (yarn): the difference that attention sees.
    """
    k_C = (fresh_k_1HCD.float() - stored_k_1HCD.float()).square().sum(dim=(0, 1, 3))
    return k_C + (fresh_v_1HCD.float() - stored_v_1HCD.float()).square().sum(dim=(0, 1, 3))
