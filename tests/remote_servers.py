"""Servers of a remote tier for tests: a Redis on a Unix socket, and an S3-compatible server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import wait_until

SECRET = "the deployment's secret"


def needs(module: str, extra: str) -> None:
    """Skip the test where an extra is not installed."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed; the extra [{extra}] brings it")


class RedisServer:
    """A `redis-server` on a Unix socket, which can be killed, paused and started again."""

    def __init__(self, folder: Path) -> None:
        needs("redis", "redis")
        self._command = shutil.which("redis-server") or shutil.which("valkey-server")
        if self._command is None:
            pytest.skip("no redis-server is installed: apt-get install redis-server")
        self._folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        options = ("--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder))
        self._process = subprocess.Popen([str(self._command), *options], stdout=subprocess.DEVNULL)

        def answers() -> bool:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.socket))
                    probe.sendall(b"PING\r\n")
                    return probe.recv(16) == b"+PONG\r\n"
                except OSError:
                    return False

        wait_until(answers, "redis-server did not start", 60.0)

    def kill(self) -> None:
        """Kill it, paused or not; a second time does nothing."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop it where it is."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """An S3-compatible server in a process of its own, and a bucket; gives the bucket's URL. Sets the environment."""
    needs("obstore", "objects")
    needs("moto", "dev")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    end_point = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch, (folder / "moto.log").open("wb") as log:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", end_point)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": "ignore"}) as server:
            try:

                def makes_bucket() -> bool:
                    try:
                        urllib.request.urlopen(urllib.request.Request(f"{end_point}/bucket", method="PUT")).close()
                    except OSError:
                        return False
                    return True

                wait_until(makes_bucket, "the S3 server did not start", 60.0)
                yield "s3://bucket/kv"
            finally:
                server.kill()
