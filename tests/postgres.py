"""A PostgreSQL server in a temporary folder, on a Unix socket and a loopback port, which may be killed and started again."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_S = 60
# What a server of tests does without: its data need to survive its own death, not the machine's.
SETTINGS = ("fsync=off", "full_page_writes=off", "max_connections=50", "shared_buffers=16MB", "autovacuum=off")


class PostgresServer:
    """A context manager around a server of its own, which trusts everybody of this machine. It is never run as root.

    Args:
        addresses: that it listens on, beside its Unix socket; anyone who connects from 10.0.0.0/8 is trusted too.
    """

    def __init__(self, addresses: str = "") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cacheblend-postgres-", dir="/tmp"))  # a socket's path is short
        self._addresses = addresses
        self._databases = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self._user = None if os.getuid() else next((user for user in ("postgres", "nobody") if _has_user(user)), None)
        if self._user is not None:
            os.chown(self._folder, pwd.getpwnam(self._user).pw_uid, -1)

    @staticmethod
    def find(program: str) -> str | None:
        """The path of one of the server's programs; None where it is not installed."""
        installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
        return shutil.which(program) or (str(installed[-1]) if installed else None)

    def url(self, database: str, host: str = "") -> str:
        """Where a database is, over the Unix socket or at an address."""
        return f"postgresql://cacheblend@{host}:{self.port}/{database}" + ("" if host else f"?host={self._folder}")

    def new_database(self) -> str:
        """The URL of a fresh, empty database."""
        import psycopg

        name = f"test_{next(self._databases)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def start(self) -> None:
        """Start it, and return when it answers."""
        server = self.find("postgres")
        assert server is not None
        data = self._folder / "data"
        options = (*SETTINGS, f"unix_socket_directories={self._folder}", f"listen_addresses={self._addresses}")
        command = [server, "-D", str(data), "-p", str(self.port), *(part for one in options for part in ("-c", one))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd="/")
        self._wait()

    def stop(self) -> None:
        """End it at once, connections and all, as an administrator may; a restart recovers nothing."""
        self._signal(signal.SIGINT)
        assert self._process is not None
        self._process.wait(START_S)

    def kill(self) -> None:
        """End it as a power cut does."""
        self._signal(signal.SIGQUIT)  # SIGKILL would leave its children, and its shared memory
        assert self._process is not None
        self._process.wait(START_S)

    def _wait(self) -> None:
        import psycopg

        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                has_ended = self._process is None or self._process.poll() is not None
                assert not has_ended, (self._folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, "the server did not answer"
                time.sleep(0.02)
            else:
                return

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        initdb = self.find("initdb")
        assert initdb is not None
        data = self._folder / "data"
        command = [initdb, "-D", str(data), "-U", "cacheblend", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run(command, capture_output=True, text=True, check=False, user=self._user, cwd="/")
        assert made.returncode == 0, made.stderr
        if self._addresses:
            with (data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all 10.0.0.0/8 trust\n")
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
