"""Text of an answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # how a tokenizer decodes the first bytes of a character
MAX_UNDECODED = 16  # tokens; a character has at most 4 bytes, so more of them are no character that is still to come
SETTLED_TOKENS = 4  # after so many more tokens a character is complete, or never will be


class TextStream:
    """Decodes tokens one by one, and ends before a stop string.

    The stream holds back a character whose bytes have not all come, and text that may be the start of a stop string.

    Args:
        tokenizer: the model's.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._without_text = frozenset(tokenizer.all_special_ids)
        self._token_ids: list[int] = []
        self._read_from = 0  # tokens before it are decoded for good, into `text`
        self._context_from = 0  # decoded along with the tokens after it, since how a token reads depends on the one before
        self._returned = 0
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that has become certain."""
        if token_id in self._without_text:
            return ""
        self._token_ids.append(token_id)
        upto, known = len(self._token_ids), self._decode(self._read_from)
        decoded = self._decode(upto)
        if len(decoded) > len(known) and not decoded.endswith(UNFINISHED):
            self._append(decoded[len(known) :], upto)
        elif upto - self._read_from > MAX_UNDECODED:
            settled = self._settled(decoded)
            self._append(self._decode(settled)[len(known) :], settled)
        return self._return(0 if self.stopped else self._possible_stop())

    def finish(self) -> str:
        """Return the text that was held back, unfinished characters included."""
        if not self.stopped:
            known = self._decode(self._read_from)
            self._append(self._decode(len(self._token_ids))[len(known) :], len(self._token_ids))
        return self._return(0)

    def _settled(self, decoded: str) -> int:
        """A place between tokens whose text no later token changes; so the tokens without a character stay few."""
        last = len(self._token_ids) - SETTLED_TOKENS
        places = range(last, last - SETTLED_TOKENS, -1)
        return next((place for place in places if decoded.startswith(self._decode(place))), last)

    def _append(self, text: str, read_from: int) -> None:
        """Add certain text, that of the tokens before `read_from`, and cut it before the first stop string."""
        searched_from = max(0, len(self.text) - self._longest_stop)
        self.text += text
        self._context_from, self._read_from = self._read_from, read_from
        found = [place for place in (self.text.find(stop, searched_from) for stop in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        sizes = range(min(self._longest_stop - 1, len(self.text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self.text[-size:]) for stop in self._stop)), 0)

    def _return(self, held_back: int) -> str:
        upto = max(self._returned, len(self.text) - held_back)
        piece, self._returned = self.text[self._returned : upto], upto
        return piece

    def _decode(self, upto: int) -> str:
        """The text of the context and the tokens after it."""
        text: str = self._tokenizer.decode(self._token_ids[self._context_from : upto], skip_special_tokens=True)
        return text
