"""The question over a prompt's stored KV: what it attends to tells which tokens are worth recomputing.

A stored token's error reaches the answer through attention: a token that nobody looks at may be far off and change nothing.
So the question runs over the stored KV first, and every token's weight is added up, over heads and layers, in the attention of
the prompt's last token, which the answer grows from. ProphetKV and QCFuse add up the weights of all the question's tokens;
the last one's alone gave a lower KL to full prefill at the same number of tokens (docs/benchmarks.md).

Shapes: H KV heads, G query heads of a KV head, Q = H x G, S rows of the pass, X = G x S, N tokens of the prompt, K tokens
whose KV is known, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import Rows, attention_weights
from .layer_source import LayerKV
from .segment import Prompt

# Of a longer question its last tokens ask. They cost what as many recomputed tokens do.
MAX_QUESTION_TOKENS = 64
MAX_START_TOKENS = 256


def question_rows(prompt: Prompt) -> torch.Tensor:
    """Sorted positions (S,) that the pass runs: the question's, which stand after the last reusable token, or else the last.

    What stands fresh at the prompt's start runs too: without the first token, where attention rests that looks at nothing, the
    weights mean little. So much of it as is not exact: the choice is the same whether a prefix of the prompt was cached or not.
    """
    reusable = prompt.reusable_N.nonzero()[:, 0]
    first = int(reusable[-1]) + 1 if len(reusable) else 0
    question = torch.arange(min(max(first, len(prompt) - MAX_QUESTION_TOKENS), len(prompt) - 1), len(prompt))
    before = min(int(reusable[0]) if len(reusable) else 0, int(question[0]), MAX_START_TOKENS)
    return torch.cat([prompt.fresh_N[:before].nonzero()[:, 0], question])


class QuestionPass:
    """The question's rows through one layer over stored KV.

    Args:
        whole: the layer's KV, keys rotated; the question's own is put into it.
        rows: the positions that run, see `question_rows`.
        window: the layer's sliding window; None for none.
        readable_K: sorted positions whose KV is known, the question's included; None for all. The others are cache misses,
            not computed yet.

    Attributes:
        attention_N: float32 (N,), the weights of the last row, in the mean over heads.
    """

    def __init__(self, whole: LayerKV, rows: Rows, window: int | None, readable_K: torch.Tensor | None) -> None:
        self._whole, self._rows, self._window, self._readable_K = whole, rows, window, readable_K
        self.attention_N = torch.zeros(whole.k_1HND.shape[2], device=whole.k_1HND.device)

    def update(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the rows' keys and values into the layer; hand back what is known of it."""
        self._whole.put(self._rows.on_device_S, k_1HSD, v_1HSD)
        k_1HND, v_1HND = self._whole.k_1HND, self._whole.v_1HND
        if self._readable_K is None:
            return k_1HND, v_1HND
        return k_1HND.index_select(2, self._readable_K), v_1HND.index_select(2, self._readable_K)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Attention output (1, S, Q, D); sets `attention_N`."""
        heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        q_HXD, k_HKD, v_HKD = q[0].unflatten(0, (heads, groups)).flatten(1, 2), k[0], v[0]
        bias_XK = self._bias_SK(q.dtype).repeat(groups, 1)
        weights_HXK = attention_weights(q_HXD, k_HKD, bias_XK, 0, kw["scaling"], kw.get("softcap"))
        attention_K = weights_HXK.unflatten(1, (groups, -1))[:, :, -1].float().mean((0, 1))
        if self._readable_K is None:
            self.attention_N += attention_K
        else:
            self.attention_N.index_add_(0, self._readable_K, attention_K)
        out_HGSD: torch.Tensor = torch.matmul(weights_HXK, v_HKD).unflatten(1, (groups, -1))
        return out_HGSD.flatten(0, 1).transpose(0, 1)[None]

    def _bias_SK(self, dtype: torch.dtype) -> torch.Tensor:
        """0 where a row sees a key, -inf elsewhere."""
        key_K = torch.arange(len(self.attention_N), device=self.attention_N.device)
        if self._readable_K is not None:
            key_K = self._readable_K
        row_S1 = self._rows.on_device_S[:, None]
        hidden_SK = key_K > row_S1
        if self._window is not None:
            hidden_SK |= key_K <= row_S1 - self._window
        return torch.zeros(hidden_SK.shape, dtype=dtype, device=key_K.device).masked_fill_(hidden_SK, -torch.inf)
