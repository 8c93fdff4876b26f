"""Passes of rows through a layer: a blend's rows, isolated sequences, and the question's rows.

Isolated encoding is a packed batch: sequences that do not see each other, without padding. Everything but attention works token
by token; attention is called once for every run of sequences of equal length. The KV of a prefix that all sequences follow is
computed once, and each sequence attends to it.

The question's pass scores tokens for recomputation, before the blend. A stored token's error reaches the answer through
attention, so every token's weight in the attention of all question tokens (ProphetKV, QCFuse) and in that of the prompt's last
token is summed over heads and layers. The last token's weights alone lose the second hop of a question (docs/adr/007).

Shapes: B sequences of a run, T tokens of each, N tokens of all or of the prompt, P tokens of a shared prefix, H KV heads,
G query heads of a KV head, Q = H x G query heads, S rows of the pass, X = S x G, K keys whose KV is known, D head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import Block, Rows, attend, attention_weights, first_seen, row_kernel, upload
from .interfaces import LayerKV
from .prompt import Prompt

# Only the last MAX_QUESTION_TOKENS question tokens run the question pass; each costs as much as a recomputed token.
MAX_QUESTION_TOKENS = 64
MAX_START_TOKENS = 256
Pair = tuple[Tensor, Tensor]


class CachePass:
    """Stands in for a cache in what layers ask of it besides `update`.

    Attributes:
        positions_S: of the rows that are run.
    """

    positions_S: Tensor

    def get_seq_length(self, *_: object) -> Tensor:
        """How far each row's position is from its number: Llama 4's layers add it to 0, 1, 2 ... for the positions."""
        return self.positions_S - torch.arange(len(self.positions_S), device=self.positions_S.device)

    def __setitem__(self, _: object, __: object) -> None:
        """KV that a layer keeps for later layers: the caller has it."""


class LayerPass(Protocol):
    """Keys, values and attention of one pass of rows through one layer; passed down as a keyword argument."""

    positions_S: Tensor

    def update(self, k_1HSD: Tensor, v_1HSD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Stands in for `Cache.update`."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        """Attention output (1, S, Q, D)."""


def scores_of(q: Tensor, kw: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the scores among the arguments of a layer's attention: scaling, soft-capping, sinks."""
    scaling = kw.get("scaling")
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return {"scaling": scaling, "softcap": kw.get("softcap"), "sinks_Q": kw.get("s_aux")}


class KVForm(Protocol):
    """How the pair that a layer caches is stored; `LayerAnatomy` has it."""

    def pack(self, one_1HSD: Tensor, other_1HSE: Tensor) -> Pair:
        """The pair as it is stored."""

    def unpack(self, k_1HSD: Tensor, v_1HSD: Tensor) -> Pair:
        """The pair from what is stored."""


class AsCached:
    """A pair is stored as a layer caches it: keys and values with heads of one size."""

    def pack(self, one_1HSD: Tensor, other_1HSE: Tensor) -> Pair:
        return one_1HSD, other_1HSE

    unpack = pack


AS_CACHED: KVForm = AsCached()


class RowsPass(CachePass):
    """Rows of a prompt through one layer: fresh KV is scattered into the layer's buffer, attention has the exact mask.

    With `scatter=False` the layer already holds the rows' fresh KV.
    """

    def __init__(self, layer_kv: LayerKV, rows: Rows, window: int | None, form: KVForm = AS_CACHED, *, scatter: bool) -> None:
        self._layer_kv, self._rows, self._window, self._form, self._scatter = layer_kv, rows, window, form, scatter

    def update(self, k_1HSD: Tensor, v_1HSD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        if self._scatter:
            self._layer_kv.put(self._rows.on_device_S, *self._form.pack(k_1HSD, v_1HSD))
        return self._form.unpack(self._layer_kv.k_1HND, self._layer_kv.v_1HND)

    def __getitem__(self, _: object) -> tuple[Tensor, Tensor]:
        """KV that an earlier layer keeps for this one: the pass was given it."""
        return self._form.unpack(self._layer_kv.k_1HND, self._layer_kv.v_1HND)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        return attend(q, k, v, self._rows, window=self._window, **scores_of(q, kw))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive sequences of equal length, from row `start` on."""

    start: int
    sequences: int
    tokens: int

    @property
    def rows(self) -> slice:
        """The rows of its tokens."""
        return slice(self.start, self.start + self.sequences * self.tokens)

    def part(self, x_1HND: Tensor) -> Tensor:
        """The run's queries, keys or values, (B, H, T, D); a view."""
        part: Tensor = x_1HND[0, :, self.rows].unflatten(1, (self.sequences, self.tokens)).transpose(0, 1)
        return part


def runs(lengths: Sequence[int]) -> Iterator[Run]:
    """The runs of sequences of these lengths; sort by length to have few."""
    start = 0
    for tokens, group in groupby(lengths):
        run = Run(start, len(list(group)), tokens)
        start = run.rows.stop
        yield run


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """KV of the prefix that every sequence of a pass follows: a pair a layer, keys rotated, (1, H, P, D) on the device."""

    tokens: int
    layers: Sequence[tuple[Tensor, Tensor]]


def prefix_mask(run: Run, prefix_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask (1, 1, T, P + T) of a run's rows: the prefix and a row's own past, within the window."""
    key_K = torch.arange(prefix_tokens + run.tokens, device=device)
    row_T1 = torch.arange(prefix_tokens, prefix_tokens + run.tokens, device=device)[:, None]
    hidden_TK = _hidden(key_K, row_T1, window)
    mask_TK = torch.zeros(hidden_TK.shape, dtype=dtype, device=device)
    return mask_TK.masked_fill_(hidden_TK, torch.finfo(dtype).min)[None, None]


def _hidden(key_K: Tensor, row_S1: Tensor, window: int | None) -> Tensor:
    """Mask (S, K) of the keys that a row does not see, from the positions of both."""
    hidden_SK = key_K > row_S1
    return hidden_SK if window is None else hidden_SK | (key_K < first_seen(row_S1, window))


class IsolatedPass(CachePass):
    """Sequences through one layer, by the model's own attention; records the keys before RoPE.

    The layer runs with the identity rotation, so that keys arrive here unrotated whatever the family's projections are, and
    keys are rotated then, queries just before the attention. x * 1 + rotate_half(x) * 0 is x, bit for bit.

    `attention` is the function of the model's own implementation, `masks` are the runs with the attention mask of each, and
    `prefix` is the layer's KV of a shared prefix; `turn_keys` and `turn_queries` rotate.
    """

    k_1HND: Tensor
    v_1HND: Tensor

    def __init__(
        self,
        turn_keys: Callable[[Tensor], Tensor],
        turn_queries: Callable[[Tensor], Tensor],
        attention: Callable[..., tuple[Tensor, Any]],
        masks: Sequence[tuple[Run, Any]],
        prefix: tuple[Tensor, Tensor] | None = None,
        form: KVForm = AS_CACHED,
    ) -> None:
        self._turn_keys, self._turn_queries, self._attention = turn_keys, turn_queries, attention
        self._masks, self._prefix, self._form = masks, prefix, form

    def update(self, k_1HSD: Tensor, v_1HSD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        self.k_1HND, self.v_1HND = self._form.pack(k_1HSD, v_1HSD)
        return self._form.unpack(self._turn_keys(self.k_1HND), self.v_1HND)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        """Rotate the queries, then every run's attention; (1, N, Q, D)."""
        q = self._turn_queries(q)
        outputs = []
        for run, run_mask in self._masks:
            q_run, k_run, v_run = map(run.part, (q, k, v))
            if self._prefix is not None:
                k_run, v_run = (
                    torch.cat([shared.expand(run.sequences, -1, -1, -1), own], dim=2)
                    for shared, own in zip(self._prefix, (k_run, v_run), strict=True)
                )
            outputs.append(self._attention(module, q_run, k_run, v_run, run_mask, **kw)[0].flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def question_rows(prompt: Prompt, *, reads_all: bool = False) -> Tensor:
    """Sorted positions (S,) of the question pass: the question's tokens after the last reusable one, at least the last token.

    Fresh tokens at the prompt's start run too: the attention sink (first token) must be among the rows, or the weights are
    meaningless. Exact tokens need not run: up to `MAX_START_TOKENS` the choice is equal whether or not a prefix was cached.

    With `reads_all` every fresh token runs, so that the last one's logits are full reuse's of this very prompt; unless it is so
    many more that a needless second round costs less.
    """
    reusable = prompt.reusable_N.nonzero()[:, 0]
    first = int(reusable[-1]) + 1 if len(reusable) else 0
    question = torch.arange(min(max(first, len(prompt) - MAX_QUESTION_TOKENS), len(prompt) - 1), len(prompt))
    before = min(int(reusable[0]) if len(reusable) else 0, int(question[0]), MAX_START_TOKENS)
    rows = torch.cat([prompt.fresh_N[:before].nonzero()[:, 0], question])
    fresh = torch.cat([prompt.fresh_N[:-1].nonzero()[:, 0], question[-1:]])
    return fresh if reads_all and len(fresh) - len(rows) <= len(reusable) // 4 else rows


class Question:
    """The rows from `question_rows`, and their attention masks, made once for each kind of layer.

    `unread_N` is a boolean mask (N,) of the cache misses, whose KV is not known yet. The rows' own KV is known.

    Attributes:
        rows: the rows.
        readable_K: LongTensor (K,) on the device, the positions whose KV is known; None for all.
        among_readable_S: LongTensor (S,) on the CPU, each row's index among them.
        first_row: the first row of the question's that score.
    """

    def __init__(self, rows: Rows, unread_N: Tensor, device: torch.device) -> None:
        readable_N = ~unread_N
        readable_N[rows.positions_S] = True
        self.rows = rows
        self._key_K = readable_N.nonzero()[:, 0]
        self.readable_K = None if bool(readable_N.all()) else upload(self._key_K, device)
        self.among_readable_S = torch.searchsorted(self._key_K, rows.positions_S)
        gaps = (rows.positions_S.diff() > 1).nonzero()[:, 0] + 1
        self._starts = sorted({0, *gaps.tolist(), *range(len(rows.positions_S) - MAX_QUESTION_TOKENS, 0, -MAX_QUESTION_TOKENS)})
        self.first_row = self._starts[-1]
        self._blocks: dict[object, list[Block]] = {}

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """The rows at the prompt's start, which see few keys, and the question's; `dtype` is that of the scores."""
        kind = window, dtype
        if kind not in self._blocks:
            positions_S, among_S = self.rows.positions_S, self.among_readable_S.tolist()
            self._blocks[kind] = blocks = []
            for first, stop in pairwise([*self._starts, len(positions_S)]):
                seen = among_S[stop - 1] + 1
                hidden_from = among_S[first] + 1 if window is None else 0
                hidden_BT = _hidden(self._key_K[hidden_from:seen], positions_S[first:stop, None], window)
                bias_BT = torch.zeros(hidden_BT.shape, dtype=dtype).masked_fill_(hidden_BT, -torch.inf)
                bias_BGT = upload(bias_BT, self.rows.on_device_S.device)[:, None]
                blocks.append(Block(slice(first, stop), 0, seen, bias_BGT, hidden_from))
        return self._blocks[kind]


class QuestionPass(CachePass):
    """The question's rows through one layer over stored KV, keys rotated; the question's own KV is put into it.

    Attributes:
        attention_2N: float32 (2, N), weights in the sum over heads: of all rows of the question, and of the last row.
        form: how the layer's KV is stored; the runner sets it.
    """

    form: KVForm = AS_CACHED

    def __init__(self, layer_kv: LayerKV, question: Question, window: int | None) -> None:
        self._layer_kv, self._question, self._window = layer_kv, question, window
        self.attention_2N = torch.zeros(2, layer_kv.k_1HND.shape[2], device=layer_kv.k_1HND.device)

    def update(self, k_1HSD: Tensor, v_1HSD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Put the rows' keys and values into the layer; return the layer's known KV."""
        readable_K = self._question.readable_K
        self._layer_kv.put(self._question.rows.on_device_S, *self.form.pack(k_1HSD, v_1HSD))
        pair = self._layer_kv.k_1HND, self._layer_kv.v_1HND
        if readable_K is not None:
            pair = pair[0].index_select(2, readable_K), pair[1].index_select(2, readable_K)
        return self.form.unpack(*pair)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        """Attention output (1, S, Q, D); sets `attention_2N`."""
        kernel, scores = row_kernel(q.dtype, q.device, q.shape[-1]), scores_of(q, kw)
        is_served = v.shape[-1] == q.shape[-1]
        if kernel is not None and is_served and (self._window is None or self._question.readable_K is None):
            question = self._question
            # The last row sees all keys.
            weights_2K, first = torch.zeros(2, k.shape[2]), question.first_row
            out = kernel.attend(
                q, k, v, question.among_readable_S, window=self._window, weights_2K=weights_2K, weighed_from=first, **scores
            )
            self._add(weights_2K)
            return out
        heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        q_HSGD = q[0].unflatten(0, (heads, groups)).transpose(1, 2)
        outputs = []
        for block in self._question.blocks(self._window, q.dtype):
            q_HXD, k_HKD, v_HKD = q_HSGD[:, block.rows].flatten(1, 2), k[0, :, : block.stop], v[0, :, : block.stop]
            weights_HXK = attention_weights(q_HXD, k_HKD, block, **scores)
            outputs.append(torch.matmul(weights_HXK, v_HKD).unflatten(1, (-1, groups)))
        # The last block is the question's rows, and sees all keys.
        self._add(torch.stack([weights_HXK[:, -of:].float().sum((0, 1)) for of in (weights_HXK.shape[1], groups)]))
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1, 2)[None].contiguous()

    def _add(self, attention_2K: Tensor) -> None:
        if self._question.readable_K is None:
            self.attention_2N += attention_2K
        else:
            self.attention_2N.index_add_(1, self._question.readable_K, attention_2K)
