"""How often those that decode take a step while a prompt is prefilled."""

from __future__ import annotations


class DecodePace:
    """Gives decoding its share of the time, and no more while somebody waits for a first token.

    A step costs about the same for one sequence as for many, since it reads the weights once: taken after every layer of a
    short prefill, steps serve one or two sequences each, and the prompt takes twice its time. Taken less often they serve all
    that were prefilled meanwhile.

    Args:
        share: of the time, above 0 and up to 1; with 1 a step follows every layer.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether the share is not used up at this moment."""
        return now_s >= self._next_s

    def stepped(self, began_s: float, ended_s: float) -> None:
        """A step took from one moment to the other."""
        self._next_s = ended_s + self._rest * (ended_s - began_s)
