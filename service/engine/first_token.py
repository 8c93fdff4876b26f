"""When the first generated token is on the host."""

from __future__ import annotations

import time

import torch
from transformers.generation.streamers import BaseStreamer


class FirstTokenClock(BaseStreamer):
    """A streamer that notes the time of the first generated token; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self._puts = 0
        self.first_token = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        """Called by `generate` at the end; nothing to do."""
