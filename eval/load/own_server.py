"""Our own service in a process of its own, for the time of a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from cacheblend.base.errors import ServiceError

LOOK_EVERY_S = 0.2
SHOWN_CHARACTERS = 2000  # of its log, where it does not start
STOP_S = 60.0


class OwnServer(NamedTuple):
    """A running service: its address and its process."""

    address: str
    pid: int


@contextmanager
def own_server(options: Sequence[str]) -> Iterator[OwnServer]:
    """Run `cacheblend serve` on a free port of this machine, and stop it after the block.

    Args:
        options: of `cacheblend serve`, host and port apart.

    Raises:
        ServiceError: it ended before it was ready; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "cacheblend.cli.main", "serve", *options]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="cacheblend-load-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as file:
            # A session of its own: Ctrl-C is this process's to handle, which then stops the service.
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            with _leaving_on_sigterm():
                address = f"http://127.0.0.1:{port}"
                _wait_until_ready(process, address, log)
                yield OwnServer(address, process.pid)
        finally:
            _stop(process)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as an exit does, so that the service is not left running."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    while not _is_ready(address):
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-SHOWN_CHARACTERS:].strip()
            raise ServiceError(f"`cacheblend serve` ended with {process.returncode} before it was ready:\n{said}")
        time.sleep(LOOK_EVERY_S)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", timeout=5).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
