"""The interface of selectors, which choose the reusable tokens that go through each layer; a schedule sets their number.

Shapes: R reusable tokens of the prompt, C candidates of a layer, N tokens of the prompt, L layers of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# Layers between two filterings: scoring the candidates of every layer costs as much as the filtering saves.
FILTER_EVERY = 2
MIN_BUCKETED_ROWS = 64  # fewer rows are not rounded
MAX_MEAN_OFF = 0.01  # relative error of the mean count that rounding may leave


@dataclass(frozen=True, slots=True)
class Schedule:
    """Counts that fall from layer to layer.

    Args:
        spread: relative distance of the ratios of layer 1 and of the last layer from the mean. 0 is the single-shot
            choice: the tokens of layer 1 serve every layer.
        first_layer_multiple: the tokens of layer 0 as a multiple of those of layer 1, which are chosen among them; None
            for all tokens, the paper's choice.
        uses_question_attention: the selector runs the question over the stored KV before the first layer, through all
            layers but the last.
    """

    spread: float
    first_layer_multiple: int | None = None
    uses_question_attention: bool = False

    def counts(self, reusable: int, layers: int, ratio: float, fresh: int | None = None) -> list[int]:
        """Number of reusable tokens that each of the layers 0..L-1 runs: `ratio` of R in the mean over layers 1 and up.

        With `fresh`, the number of other rows that run, counts are rounded to numbers of rows that recur (`bucket_rows`).
        """
        later = self._later_counts(reusable, layers - 1, ratio, fresh)
        if ratio == 0:
            return [0, *later]
        if self.first_layer_multiple is None:
            return [reusable, *later]
        first = later[0] if later else round(ratio * reusable)
        return [min(self.first_layer_multiple * first, reusable), *later]

    def _later_counts(self, reusable: int, later: int, ratio: float, fresh: int | None) -> list[int]:
        """The counts of layers 1 and up, falling every second layer.

        The slope is limited so that no share passes 1, which preserves the mean without clamping. Layers of a pair have equal
        counts, so the second is not scored. Rounding errors are carried to later layers; if they cannot be compensated, the
        counts are not rounded.
        """
        slope = min(self.spread, (1 - ratio) / ratio) if ratio > 0 and later > 1 else 0.0
        falling = [1 + slope * (1 - 2 * step / max(later - 1, 1)) for step in range(later)]
        parts = [falling[first : first + FILTER_EVERY] for first in range(0, later, FILTER_EVERY)]
        wanted = [ratio * reusable * sum(part) / len(part) for part in parts]
        exact = [min(round(tokens), reusable) for part, tokens in zip(parts, wanted, strict=True) for _ in part]
        if fresh is None or slope < self.spread or ratio == 1:  # nearly all run: later layers could not make up for rounding
            return exact
        bucketed, limit, owed = list[int](), reusable, 0.0
        for part, tokens in zip(parts, wanted, strict=True):
            limit = max(0, min(bucket_rows(round(tokens + owed / len(part)), fresh), limit))
            bucketed += [limit] * len(part)
            owed += len(part) * (tokens - limit)
        return bucketed if abs(sum(bucketed) - sum(exact)) <= MAX_MEAN_OFF * sum(exact) else exact


def bucket_rows(tokens: int, fresh: int) -> int:
    """Round `tokens` so that a layer's rows, `fresh` ones included, are a number that recurs in other prompts.

    Rows become a multiple of a sixteenth to an eighth of the tokens. oneDNN compiles a 16-bit product for each new number of
    rows, 2 to 20 ms and 1 MB for each weight of a layer (docs/adr/020).
    """
    if tokens + fresh < MIN_BUCKETED_ROWS:
        return tokens
    step = 1 << max(0, tokens.bit_length() - 4)
    return max(0, (tokens + fresh + step // 2) // step * step - fresh)


@dataclass(frozen=True, slots=True, eq=False)
class SelectionStep:
    """Input of a selector at one layer.

    Args:
        layer: index of the layer about to run, from 0.
        layers: L.
        reusable: R.
        candidates_C: sorted LongTensor of absolute positions: every reusable one at layer 0, later those chosen at the
            previous layer.
        deviation_C: function that projects fresh K and V of all candidates, stores them, and compares them with the stored
            ones; returns float32 (C,). Not available at layer 0, where nothing has run yet.
        attention_C: float32, the question's attention over the stored KV (`QuestionPass`), summed over this layer and
            those after it; 0 where the selector does not read it.
        bridge_C: boolean, whether a candidate links chunks (`Prompt.bridges_N`); false where the selector reads no attention.
        offset_C: LongTensor, each candidate's index in its chunk.
        fresh: number of other rows that run.
    """

    layer: int
    layers: int
    reusable: int
    candidates_C: torch.Tensor
    deviation_C: Callable[[], torch.Tensor]
    attention_C: torch.Tensor
    bridge_C: torch.Tensor
    offset_C: torch.Tensor
    fresh: int = 0

    def all(self) -> torch.Tensor:
        """The mask of every candidate."""
        return torch.ones(len(self.candidates_C), dtype=torch.bool)

    def top(self, score_C: torch.Tensor, count: int) -> torch.Tensor:
        """The mask of the `count` candidates of highest score, or of all if there are fewer."""
        chosen_C = torch.zeros(len(self.candidates_C), dtype=torch.bool)
        chosen_C[torch.topk(score_C, min(count, len(chosen_C))).indices.cpu()] = True
        return chosen_C


class Selector(Protocol):
    """Picks the reusable tokens that a layer recomputes, among those of the previous layer.

    Those of this package keep the recompute ratio that made them as `ratio`.

    Three attributes are optional. If `reads_attention` is true, the question runs over the stored KV first and fills
    `SelectionStep.attention_C`. If `refreshes_dropped` is true, K and V of the candidates that a layer drops are projected
    there a last time. `schedule` is a `Schedule`, whose counts the loading controller predicts with. A selector need not
    call `SelectionStep.deviation_C`; `FusionResult.deviation` is then 0.
    """

    def select(self, step: SelectionStep) -> torch.Tensor:
        """A boolean mask (C,) of the candidates that go through this layer's attention and MLP."""
