"""A hostile tenant at full speed beside a well-behaved one, and what the latter notices of it.

    python scripts/attack_tenants.py --seconds 300

The good tenant of a `cacheblend serve` asks one streamed question after the other: before, during and after an attack. The
hostile one uploads (and hangs up on half of it), sends long titles, bodies of tens of megabytes, a cache salt a question,
questions whose client leaves, questions of 100,000 characters, half requests and nothing, all at once and without a pause, from
a process at niceness 10: a real tenant computes on its own machine.

The last line of stdout is a JSON object of figures; the exit code is 1 if one of these bounds does not hold:

`healthz_worst_s`: longest answer of `/healthz` under attack; at most 0.5.
`ttft_ratio`: of the good tenant's median seconds to the first token under attack, to those before and after; at most 3.
`time_outs`, `failures`: of the good tenant's requests; 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import httpx

from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.service.http.config import hash_key, new_key

BOUNDS = {"healthz_worst_s": 0.5, "ttft_ratio": 3.0, "time_outs": 0, "failures": 0}
TIMEOUT_S, HOSTILE_START_S = 30.0, 3.0
IDLE_CONNECTIONS = 200
HUGE_BYTES = 24 * 2**20
BE_HOSTILE = "--be-hostile"  # the first argument of the hostile tenant's process
CHAT, UPLOAD = "/v1/chat/completions", "/v1/documents"
TEXTS = [text[:1000] for text in topics.values() if len(text) > 1000][:60]  # the good tenant's documents
QUESTIONS = [f"What does the text number {number} say, and about what?" for number in range(50)]
WORDS = [f"word{number}" for number in range(400)]


class GoodTenant:
    """Asks one question after the other, and `/healthz` meanwhile."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self.time_outs = self.failures = 0

    def ask_for(self, seconds: float) -> tuple[list[float], list[float]]:
        """Seconds to the first tokens, and of the answers of `/healthz`."""
        stop, healthz, ttft = threading.Event(), list[float](), list[float]()
        prober = threading.Thread(target=self._probe, args=(stop, healthz))
        prober.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._counted():
                ttft.append(self._ask(random.choice(QUESTIONS)))
        stop.set()
        prober.join()
        return ttft, healthz

    def _ask(self, question: str) -> float:
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "max_tokens": 4, "stream": True}
        began, first = time.perf_counter(), 0.0
        with self._client.stream("POST", CHAT, json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                first = first or (time.perf_counter() - began if line.startswith("data: {") else 0.0)
        return first

    def _probe(self, stop: threading.Event, healthz: list[float]) -> None:
        with httpx.Client(base_url=self._client.base_url, timeout=TIMEOUT_S) as client:
            while not stop.wait(0.1):
                began = time.perf_counter()
                with self._counted():
                    client.get("/healthz").raise_for_status()
                healthz.append(time.perf_counter() - began)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            print(repr(error), file=sys.stderr)
            is_late = isinstance(error, httpx.TimeoutException)
            self.time_outs, self.failures = self.time_outs + is_late, self.failures + (not is_late)


class HostileTenant:
    """Repeats all attacks at once, in threads."""

    def __init__(self, address: str, key: str, model: str) -> None:
        self._address, self._model = address, model
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=address, headers=headers, limits=limits, timeout=TIMEOUT_S)
        huge = b'{"documents": [' + b"1," * (HUGE_BYTES // 2) + b"1]}"
        attacks: dict[Callable[[], None], int] = {
            lambda: self._upload(" ".join(random.choices(WORDS, k=2000)), random.choice((0.5, TIMEOUT_S))): 6,
            lambda: self._upload("words", title="t " * random.choice((500, 100_000))): 2,
            lambda: self._post(random.choice((UPLOAD, CHAT)), huge): 2,
            lambda: self._ask(random.choice(QUESTIONS), cache_salt=f"salt-{random.random()}"): 8,
            lambda: self._ask(" ".join(random.choices(WORDS, k=300)), random.uniform(0.05, 0.5)): 8,
            lambda: self._ask("word " * 20_000): 2,
            self._idle: 1,
        }
        for attack, threads in attacks.items():
            for _ in range(threads):
                threading.Thread(target=self._repeat, args=(attack,)).start()

    def _repeat(self, attack: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError, OSError):
                attack()

    def _post(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = TIMEOUT_S) -> None:
        self._client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), timeout=timeout_s)

    def _upload(self, text: str, timeout_s: float = TIMEOUT_S, title: str = "") -> None:
        documents = [{"id": f"h{random.randrange(50)}", "title": title, "text": f"{text} {place}"} for place in range(5)]
        self._post(UPLOAD, {"documents": documents}, timeout_s)

    def _ask(self, question: str, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        message = {"role": "user", "content": question}
        self._post(CHAT, {"model": self._model, "messages": [message], "max_tokens": 64, **options}, timeout_s)

    def _idle(self) -> None:
        host, port = self._address.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for number in range(IDLE_CONNECTIONS):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
                if number % 2:
                    connection.sendall(b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n")
            time.sleep(10)


def attack(address: str, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    """Ask before, during and after the attack; the figures."""
    with httpx.Client(base_url=address, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {keys['good']}"}) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        documents = [{"id": f"t{number}", "text": text} for number, text in enumerate(TEXTS)]
        client.post(UPLOAD, json={"documents": documents}, timeout=20 * TIMEOUT_S).raise_for_status()
        GoodTenant(client, model).ask_for(2.0)
        good = GoodTenant(client, model)
        alone = good.ask_for(max(3.0, seconds / 10))[0]
        process = subprocess.Popen([sys.executable, __file__, BE_HOSTILE, address, keys["hostile"], model])
        time.sleep(HOSTILE_START_S)
        attacked, healthz = good.ask_for(seconds)
        process.kill()
        alone += good.ask_for(max(3.0, seconds / 10))[0]
    ttft_alone_s, ttft_attacked_s = median(alone or [TIMEOUT_S]), median(attacked or [TIMEOUT_S])
    return {
        "answers": len(attacked),
        "healthz_worst_s": round(max(healthz, default=TIMEOUT_S), 3),
        "ttft_alone_s": round(ttft_alone_s, 4),
        "ttft_attacked_s": round(ttft_attacked_s, 4),
        "ttft_ratio": round(ttft_attacked_s / ttft_alone_s, 2),
        "time_outs": good.time_outs,
        "failures": good.failures,
    }


@contextlib.contextmanager
def served(folder: Path, keys: dict[str, str], model: str) -> Iterator[str]:
    """The address of a server with these tenants."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tables = "".join(f'[tenants.{name}]\napi_key_sha256 = ["{hash_key(key)}"]\n' for name, key in keys.items())
    (folder / "serve.toml").write_text(f'store_dir = "{folder / "store"}"\n{tables}', encoding="utf-8")
    command = [sys.executable, "-m", "cacheblend.cli.main", "serve", "--model", model, "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--config", str(folder / "serve.toml")], stdout=log, stderr=log)
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).is_success:
                    break
            time.sleep(0.2)
        else:
            sys.exit(f"`cacheblend serve` ended before it was ready:\n{(folder / 'log').read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    """Run it."""
    if BE_HOSTILE in sys.argv:
        os.nice(10)
        HostileTenant(*sys.argv[2:])  # until the process is killed
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=DEFAULT_MODEL, help="see `cacheblend serve --help`")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack (default: %(default)s)")
    options = parser.parse_args()
    keys = {name: new_key() for name in ("good", "hostile")}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), keys, options.model) as address:
        figures = attack(address, keys, options.seconds)
    holds = all(figures[name] <= bound for name, bound in BOUNDS.items())
    print(json.dumps({**figures, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
