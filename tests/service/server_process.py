"""The service in a process of its own, which tells what it holds, and may be killed.

    python tests/service/server_process.py '{"model": ..., "store_dir": ..., "port": ...}'

serves as `cacheblend serve` does, with a bag of words for an embedder. For each line on stdin it answers what it holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx

MODEL = "tiny"
LOOK_S = 0.05
START_S, STOP_S = 180, 60  # a start takes ten seconds of a core, and several servers may start at once
# Whatever of these is alive keeps a request's KV, pins or place.
OF_REQUESTS = ("FusionResult", "SequenceKV", "ServedRequest", "Placement", "LayerLoader", "CachedPrefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConfig:
    """What is served. Budgets, limits and names are `EngineConfig`'s, `ServingConfig`'s and `HttpConfig`'s.

    Args:
        answers: file that every greedy answer is written to, a line each (`RecordedAnswer`); None for none.
    """

    model: str
    store_dir: str
    port: int
    chunk_tokens: int = 24
    ram_budget_bytes: int = 2**30
    nvme_budget_bytes: int = 2**30
    prefix_budget_bytes: int = 2**20
    max_num_seqs: int = 16
    max_waiting: int = 64
    max_body_bytes: int = 2**20
    guard_share: float = 0.05
    grace_s: float = 30.0
    answers: str | None = None
    host: str = "127.0.0.1"
    remote: str | None = None
    remote_secret: str | None = None


class ServerProcess:
    """A context manager: starts the process, waits until requests are served, and stops it by SIGTERM at the end.

    Args:
        config: what is served.
        log: file that its stderr is appended to.
        within: a command that runs it elsewhere, such as `ip netns exec NAME`.
    """

    def __init__(self, config: ServedConfig, log: Path, within: Sequence[str] = ()) -> None:
        self.address = f"http://{config.host}:{config.port}"
        self._log: IO[bytes] = log.open("ab")
        command = [*within, sys.executable, __file__, json.dumps(asdict(config))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the clients need a core too
        )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def wait_until_ready(self) -> None:
        """Return when `/readyz` says so.

        Raises:
            RuntimeError: it ended, or took too long.
        """
        for _ in range(round(START_S / LOOK_S)):  # looks, not seconds: a machine that stands still takes none
            if self.exit_code is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.address}/readyz").status_code == 200:
                    return
            time.sleep(LOOK_S)
        raise RuntimeError(f"the server did not start: exit code {self.exit_code}, log in {self._log.name}")

    def held(self) -> dict[str, int]:
        """What it holds now, by name: see `held`, and its open files and threads as the system counts them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("held\n")
        self._process.stdin.flush()
        proc = Path(f"/proc/{self.pid}")
        told: dict[str, int] = json.loads(self._process.stdout.readline())
        return {"open_files": len(list((proc / "fd").iterdir())), "threads": len(list((proc / "task").iterdir())), **told}

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; gives its exit code.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def resident_bytes(pid: int) -> int:
    """`VmRSS` of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def held(server: Any) -> dict[str, int]:
    """What this process's requests, pins and caches hold, all of it 0 when nothing is asked and nothing waits; and `VmRSS`.

    Garbage is collected before, and what the C library's allocator holds free goes back to the system, where it is glibc's:
    its arenas keep the most that was ever in use at once, and that goes up in steps for long under a load of many threads.
    """
    from cacheblend.loader.layer_loader import THREADS

    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    alive = Counter(type(one).__name__ for one in gc.get_objects() if type(one).__name__ in OF_REQUESTS)
    engine, state = server.engines[""], server.scheduler.state
    blocks = engine.prefixes._blocks
    return {
        "waiting": state.waiting,
        "prefilling": state.prefilling,
        "decoding": state.decoding,
        "loading": THREADS.busy,
        "pins": engine.store._pins._pinned.total(),
        "prefix_blocks_in_use": sum(part.users > 0 for part in blocks._parts.values()),
        "pending_writes": engine.store.stats().pending_writes,
        "foreground": engine.foreground.running,
        "missed_chunks": engine.background.waiting,
        "checks": int(server.scheduler._shadow.has_work),
        "objects_of_requests": alive.total(),
        "resident_bytes": resident_bytes(os.getpid()),
    }


def main(config: ServedConfig) -> None:
    """Serve until SIGTERM."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    from fakes import FakeEmbedder
    from recorded import RecordedAnswer

    from cacheblend.retriever import RetrieverConfig
    from cacheblend.service import EngineConfig
    from cacheblend.service.http.config import HttpConfig
    from cacheblend.service.http.run import run
    from cacheblend.service.http.server import Server
    from cacheblend.service.serving.config import ServingConfig
    from cacheblend.service.serving.served_request import Done, Failed, ServedRequest
    from cacheblend.store import StoreConfig

    logging.basicConfig(level=logging.WARNING)
    engine_config = EngineConfig(
        model=config.model,
        store_dir=config.store_dir,
        prefix_budget_bytes=config.prefix_budget_bytes,
        retriever=RetrieverConfig(chunk_tokens=config.chunk_tokens),
        store=StoreConfig(
            ram_budget_bytes=config.ram_budget_bytes,
            nvme_budget_bytes=config.nvme_budget_bytes,
            remote=config.remote,
            remote_secret=config.remote_secret,
        ),
    )
    serving = ServingConfig(
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        guard_share=config.guard_share,
        grace_s=config.grace_s,
    )
    http = HttpConfig(host=config.host, port=config.port, served_model_name=MODEL, max_body_bytes=config.max_body_bytes)
    with open(config.answers or os.devnull, "a") as answers:

        def record(request: ServedRequest, how: Done | Failed | None) -> None:
            if isinstance(how, Done) and not request.prepared.sampling.get("do_sample"):
                answers.write(RecordedAnswer.of(how.answer).line())

        with Server(engine_config, serving, http, embedder=FakeEmbedder(dimensions=4096), observer=record) as server:

            def answer_stdin() -> None:
                for _ in sys.stdin:
                    print(json.dumps(held(server)), flush=True)

            threading.Thread(target=answer_stdin, daemon=True).start()
            run(server)


if __name__ == "__main__":
    main(ServedConfig(**json.loads(sys.argv[1])))
