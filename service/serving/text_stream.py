"""Text of a growing list of tokens, given out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer gives for the first bytes of a character


class TextStream:
    """Decodes tokens one by one; ends before a stop string.

    A character whose bytes have not all come is held back, and so is what may be the start of a stop string.

    Args:
        tokenizer: the model's.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._token_ids: list[int] = []
        self._read_from = 0  # tokens before it are decoded for good, into `text`
        self._context_from = 0  # decoded along with the rest, since how a token reads depends on the one before
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain with this token."""
        self._token_ids.append(token_id)
        known = self._decode(self._token_ids[self._context_from : self._read_from])
        whole = self._decode(self._token_ids[self._context_from :])
        if len(whole) > len(known) and not whole.endswith(UNFINISHED):
            self.text += whole[len(known) :]
            self._context_from, self._read_from = self._read_from, len(self._token_ids)
        self._cut_at_stop()
        return self._give(0 if self.stopped else self._may_be_stop())

    def finish(self) -> str:
        """The rest, unfinished characters included."""
        if not self.stopped:
            known = self._decode(self._token_ids[self._context_from : self._read_from])
            self.text += self._decode(self._token_ids[self._context_from :])[len(known) :]
            self._context_from = self._read_from = len(self._token_ids)
            self._cut_at_stop()
        return self._give(0)

    def _cut_at_stop(self) -> None:
        found = [place for place in (self.text.find(stop, 0) for stop in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _may_be_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        ends = (size for size in range(min(longest, len(self.text)), 0, -1) if self._starts_stop(self.text[-size:]))
        return next(ends, 0)

    def _starts_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)

    def _give(self, held_back: int) -> str:
        upto = max(self._given, len(self.text) - held_back)
        piece, self._given = self.text[self._given : upto], upto
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
