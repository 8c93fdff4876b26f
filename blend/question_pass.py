"""The question's pass: its rows run through each layer over the stored KV, before the blend.

It scores tokens for recomputation. A stored token's error reaches the answer through attention, so
every token's weight in the attention of the prompt's last token is summed over heads and layers. ProphetKV and QCFuse sum
the weights of all question tokens; the last token's weights gave a lower KL to full prefill (docs/what-did-not-work.md).

Shapes: N tokens of the prompt, H KV heads, G query heads of a KV head, Q = H x G query heads, S rows of the pass, X = S x G,
K tokens whose KV is known, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .attention import Block, Rows, attention_weights, row_kernel, upload

if TYPE_CHECKING:
    from torch import nn

    from .layer_source import LayerKV
    from .prompt import Prompt

# Only the last MAX_QUESTION_TOKENS question tokens run the question pass; each costs as much as a recomputed token.
MAX_QUESTION_TOKENS = 64
MAX_START_TOKENS = 256


def question_rows(prompt: Prompt) -> torch.Tensor:
    """Sorted positions (S,) of the question pass: the question's tokens after the last reusable one, at least the last token.

    Fresh tokens at the prompt's start run too: the attention sink (first token) must be among the rows, or the weights are
    meaningless. Exact tokens need not run: the choice is equal whether or not a prefix of the prompt was cached.
    """
    reusable = prompt.reusable_N.nonzero()[:, 0]
    first = int(reusable[-1]) + 1 if len(reusable) else 0
    question = torch.arange(min(max(first, len(prompt) - MAX_QUESTION_TOKENS), len(prompt) - 1), len(prompt))
    before = min(int(reusable[0]) if len(reusable) else 0, int(question[0]), MAX_START_TOKENS)
    return torch.cat([prompt.fresh_N[:before].nonzero()[:, 0], question])


class Question:
    """The rows of the question's pass through all layers, and their attention masks, made once for each kind of layer.

    Args:
        rows: the positions from `question_rows`.
        unread_N: boolean (N,), true where no KV is known yet: cache misses. The rows' own KV is known.
        device: device of the keys.
    """

    def __init__(self, rows: Rows, unread_N: torch.Tensor, device: torch.device) -> None:
        readable_N = ~unread_N
        readable_N[rows.positions_S] = True
        self.rows = rows
        self._key_K = readable_N.nonzero()[:, 0]
        self.readable_K = None if bool(readable_N.all()) else upload(self._key_K, device)
        self.among_readable_S = torch.searchsorted(self._key_K, rows.positions_S)
        self._blocks: dict[object, list[Block]] = {}

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """The rows at the prompt's start, which see few keys, and the question's.

        Args:
            window: the layer's sliding window; None for none.
            dtype: dtype of the scores.
        """
        kind = window, dtype
        if kind not in self._blocks:
            positions_S, device = self.rows.positions_S, self.rows.on_device_S.device
            gaps = (positions_S.diff() > 1).nonzero()[:, 0] + 1
            self._blocks[kind] = blocks = []
            for first, stop in pairwise([0, *gaps.tolist(), len(positions_S)]):
                row_B1 = positions_S[first:stop, None]
                seen = int(torch.searchsorted(self._key_K, positions_S[stop - 1], right=True))
                hidden_from = int(torch.searchsorted(self._key_K, row_B1[0, 0], right=True)) if window is None else 0
                key_T = self._key_K[hidden_from:seen]
                hidden_BT = key_T > row_B1
                if window is not None:
                    hidden_BT |= key_T <= row_B1 - window
                bias_BT = upload(torch.zeros(hidden_BT.shape, dtype=dtype).masked_fill_(hidden_BT, -torch.inf), device)
                blocks.append(Block(slice(first, stop), 0, seen, bias_BT[:, None], hidden_from))
        return self._blocks[kind]


class QuestionPass:
    """The question's rows through one layer over stored KV.

    Args:
        layer_kv: the layer's KV, keys rotated; the question's own KV is put into it.
        question: the rows and their masks.
        window: the layer's sliding window; None for none.

    Attributes:
        attention_N: float32 (N,), the weights of the last row, in the mean over heads.
    """

    def __init__(self, layer_kv: LayerKV, question: Question, window: int | None) -> None:
        self._layer_kv, self._question, self._window = layer_kv, question, window
        self.attention_N = torch.zeros(layer_kv.k_1HND.shape[2], device=layer_kv.k_1HND.device)

    def update(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the rows' keys and values into the layer; return the layer's known KV."""
        self._layer_kv.put(self._question.rows.on_device_S, k_1HSD, v_1HSD)
        k_1HND, v_1HND, readable_K = self._layer_kv.k_1HND, self._layer_kv.v_1HND, self._question.readable_K
        if readable_K is None:
            return k_1HND, v_1HND
        return k_1HND.index_select(2, readable_K), v_1HND.index_select(2, readable_K)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Attention output (1, S, Q, D); sets `attention_N`."""
        kernel = row_kernel(q.dtype, q.device, q.shape[-1])
        if kernel is not None and (self._window is None or self._question.readable_K is None):
            weights_QK = torch.zeros(q.shape[1], k.shape[2])
            at_S = self._question.among_readable_S
            scaling, softcap = kw["scaling"], kw.get("softcap")
            out = kernel.attend(q, k, v, at_S, scaling=scaling, window=self._window, softcap=softcap, weights_QN=weights_QK)
            self._add(weights_QK.mean(0))
            return out
        heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        q_HSGD = q[0].unflatten(0, (heads, groups)).transpose(1, 2)
        out_1SQD: torch.Tensor = q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])
        out_HSGD = out_1SQD[0].unflatten(1, (heads, groups)).transpose(0, 1)
        for block in self._question.blocks(self._window, q.dtype):
            q_HXD, k_HKD, v_HKD = q_HSGD[:, block.rows].flatten(1, 2), k[0, :, : block.stop], v[0, :, : block.stop]
            weights_HXK = attention_weights(q_HXD, k_HKD, block, kw["scaling"], kw.get("softcap"))
            out_HSGD[:, block.rows] = torch.matmul(weights_HXK, v_HKD).unflatten(1, (-1, groups))
        self._add(weights_HXK[:, -groups:].float().mean((0, 1)))  # of the last row; the last block sees all keys
        return out_1SQD

    def _add(self, attention_K: torch.Tensor) -> None:
        if self._question.readable_K is None:
            self.attention_N += attention_K
        else:
            self.attention_N.index_add_(0, self._question.readable_K, attention_K)
