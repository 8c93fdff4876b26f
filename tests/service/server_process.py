"""The service in a process of its own, which may be killed.

    python tests/service/server_process.py '{"model": ..., "store_dir": ..., "port": ...}'

serves as `cacheblend serve` does, with a bag of words for an embedder.
"""

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

MODEL = "tiny"
LOOK_S = 0.05
START_S, STOP_S = 180, 60  # a start takes ten seconds of a core, and several servers may start at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConfig:
    """A server: names are those of `EngineConfig`, `ServingConfig` and `HttpConfig`."""

    model: str
    store_dir: str
    port: int
    chunk_tokens: int = 24
    ram_budget_bytes: int = 2**30
    guard_share: float = 0.05
    grace_s: float = 30.0


class ServerProcess:
    """Starts the process, waits until requests are served, and stops it by SIGTERM at the end; `log` receives its stderr."""

    def __init__(self, config: ServedConfig, log: Path) -> None:
        self.address = f"http://127.0.0.1:{config.port}"
        self._log: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(config))],
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the clients need a core too
        )

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end, and return its exit code."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _wait_until_ready(self) -> None:
        for _ in range(round(START_S / LOOK_S)):  # looks, not seconds: a machine that stands still takes none
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.address}/readyz").status_code == 200:
                    return
            time.sleep(LOOK_S)
        raise RuntimeError(f"the server did not start: exit code {self._process.poll()}, log in {self._log.name}")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to who asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.closing(socket.socket()) as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def main(config: ServedConfig) -> None:
    """Serve until SIGTERM."""
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from fakes import FakeEmbedder

    from cacheblend.retriever import RetrieverConfig
    from cacheblend.service import EngineConfig
    from cacheblend.service.http.app import run
    from cacheblend.service.http.config import HttpConfig
    from cacheblend.service.http.server import Server
    from cacheblend.service.serving.scheduler import ServingConfig
    from cacheblend.store import StoreConfig

    logging.basicConfig(level=logging.WARNING)
    engine_config = EngineConfig(
        model=config.model,
        store_dir=config.store_dir,
        retriever=RetrieverConfig(chunk_tokens=config.chunk_tokens),
        store=StoreConfig(ram_budget_bytes=config.ram_budget_bytes),
    )
    serving = ServingConfig(guard_share=config.guard_share, grace_s=config.grace_s)
    http = HttpConfig(port=config.port, served_model_name=MODEL)
    with Server(engine_config, serving, http, embedder=FakeEmbedder(dimensions=4096)) as server:
        run(server)


if __name__ == "__main__":
    main(ServedConfig(**json.loads(sys.argv[1])))
