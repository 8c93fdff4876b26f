"""A hostile tenant at full speed beside a well-behaved one, and what the latter notices of it.

    python scripts/attack_tenants.py                     # SmolLM2, five minutes
    python scripts/attack_tenants.py --seconds 20 --json

`cacheblend serve` runs in a process of its own with two tenants. The good one has documents and asks one streamed question
after the other, alone for a tenth of the time, then under attack, then alone again. The hostile one does all at once, in many
threads and without a pause: uploads (half of them hung up on), the longest and too long titles, bodies of tens of megabytes, a
cache salt a question, questions that nobody waits for, questions of 100,000 characters, connections that send half a request or
nothing.

Figures, of which those with a bound must hold, else the exit code is 1:

`healthz_worst_s`: longest answer of `/healthz` under attack; at most 0.5.
`ttft_alone_s`, `ttft_attacked_s`: median seconds from sending to the first token at the good tenant; `ttft_ratio` at most 2.
`stages_alone`, `stages_attacked`: medians of what the server says of it: `prepare_s` from arrival to a prompt that is laid out,
`retrieve_s` of that, `queue_s` until its prefill, `ttft_s` from the prompt to the first token, queue included, and in
`server_ttft_s` the whole, from a request's headers to its first token at the server. What is left of the client's own time is
the machine, which client and server share.
`time_outs`, `failures`: of the good tenant's requests, both phases; 0.
`rss_before_mib`, `rss_after_mib`: VmRSS of the server before the attack, and `SETTLE_S` after it; `rss_growth` at most 0.2.
`WARM_S` of attack come first, unmeasured, unless the whole is shorter: budgets fill with either tenant's KV, and stay full.
`hostile`: what the hostile tenant was answered, by kind; "dropped" is what it hung up on or was cut off.

The hostile clients are a process of their own, at niceness 10: a real tenant has a machine of its own, and what its clients
compute is no load of the server's.
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
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.eval.handbook import handbook_documents
from cacheblend.service.http.auth import hash_key, new_key

BOUNDS = {"healthz_worst_s": 0.5, "ttft_ratio": 2.0, "time_outs": 0, "failures": 0, "rss_growth": 0.2}
TIMEOUT_S, SETTLE_S, WARM_S = 30.0, 30.0, 60.0
DOCUMENTS = 35  # of the good tenant, unless said otherwise
IDLE_CONNECTIONS = 200
HUGE_BYTES = 24 * 2**20
BUDGET = 128 * 2**20  # of RAM copies, and of prefix blocks
HOSTILE_START_S = 2.0  # for its process
BE_HOSTILE = "--be-hostile"  # what it is called with
CHAT, UPLOAD = "/v1/chat/completions", "/v1/documents"
QUESTIONS = [f"Who is named in the article {number}, and what did they make?" for number in range(50)]
WORDS = [f"word{number}" for number in range(400)]


class GoodTenant:
    """Asks one question after the other, and looks at `/healthz` meanwhile.

    Args:
        client: with the tenant's key.
        model: the served model's name.
    """

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self.time_outs, self.failures = 0, list[str]()
        self.take_stages()

    def take_stages(self) -> dict[str, list[float]]:
        """Seconds of the stages of what was asked since the last time."""
        taken = getattr(self, "_stages", {})
        self._stages = {name: list[float]() for name in ("prepare_s", "retrieve_s", "queue_s", "ttft_s", "server_ttft_s")}
        return taken

    def ask_for(self, seconds: float) -> tuple[list[float], list[float]]:
        """Seconds to first tokens, and of the answers of `/healthz`."""
        stop, healthz = threading.Event(), list[float]()
        prober = threading.Thread(target=self._probe, args=(stop, healthz))
        prober.start()
        until, ttft = time.monotonic() + seconds, list[float]()
        while time.monotonic() < until:
            self._ask(random.choice(QUESTIONS), ttft)
        stop.set()
        prober.join()
        return ttft, healthz

    def _ask(self, question: str, ttft: list[float]) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "max_tokens": 4, "stream": True}
        began = time.perf_counter()
        try:
            with self._client.stream("POST", CHAT, json=body) as response:
                if response.status_code != 200:
                    self.failures.append(f"{response.status_code} {response.read()[:200]!r}")
                    return
                first = None
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first = first or time.perf_counter() - began
                    if report := json.loads(line.removeprefix("data: ")).get("cacheblend"):
                        report["server_ttft_s"] = report["prepare_s"] + report["ttft_s"]
                        for name, values in self._stages.items():
                            values.append(report[name])
                ttft.append(first or time.perf_counter() - began)
        except httpx.TimeoutException:
            self.time_outs += 1
        except httpx.TransportError as error:
            self.failures.append(repr(error))

    def _probe(self, stop: threading.Event, healthz: list[float]) -> None:
        with httpx.Client(base_url=self._client.base_url, timeout=TIMEOUT_S) as client:
            while not stop.wait(0.1):
                began = time.perf_counter()
                try:
                    client.get("/healthz").raise_for_status()
                except httpx.TimeoutException:
                    self.time_outs += 1
                except httpx.HTTPError as error:
                    self.failures.append(f"healthz: {error!r}")
                healthz.append(time.perf_counter() - began)


class HostileTenant:
    """All attacks at once, until it is stopped.

    Args:
        address: of the server.
        key: the tenant's.
        model: the served model's name.
        without: attacks to leave out, by name.
    """

    def __init__(self, address: str, key: str, model: str, without: Collection[str] = ()) -> None:
        self._address, self._model = address, model
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=address, headers=headers, limits=limits, timeout=TIMEOUT_S)
        self._huge = b'{"documents": [' + b"1," * (HUGE_BYTES // 2) + b"1]}"
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._answers: dict[str, Counter[str]] = {}
        kinds: dict[str, tuple[Callable[[], int | None], int]] = {
            "uploads": (self._upload, 6),
            "titles": (self._title, 2),
            "huge bodies": (self._send_huge, 2),
            "salts": (self._salt, 8),
            "drops": (self._drop, 8),
            "long questions": (self._long_question, 2),
            "idle": (self._idle, 1),
        }
        self._threads = [
            threading.Thread(target=self._repeat, args=(name, attack), daemon=True)
            for name, (attack, count) in kinds.items()
            for _ in range(0 if name in without else count)
        ]

    def start(self) -> None:
        """Attack from now on."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> dict[str, dict[str, int]]:
        """End; what was answered, by kind of attack."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        with self._lock:
            return {kind: dict(sorted(counts.items())) for kind, counts in sorted(self._answers.items())}

    def _repeat(self, name: str, attack: Callable[[], int | None]) -> None:
        while not self._stop.is_set():
            try:
                outcome = str(attack() or "done")
            except (httpx.HTTPError, OSError):
                outcome = "dropped"
            with self._lock:
                self._answers.setdefault(name, Counter())[outcome] += 1

    def _post(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = TIMEOUT_S) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._client.post(path, content=content, timeout=timeout_s).status_code

    def _chat(self, question: str, timeout_s: float = TIMEOUT_S, **options: Any) -> int:
        message = {"role": "user", "content": question}
        return self._post(CHAT, {"model": self._model, "messages": [message], **options}, timeout_s)

    def _upload(self) -> int:
        text = " ".join(random.choices(WORDS, k=2000))
        documents = [{"id": f"h{random.randrange(50)}", "text": f"{text} {place}"} for place in range(5)]
        return self._post(UPLOAD, {"documents": documents}, random.choice((0.5, TIMEOUT_S)))

    def _title(self) -> int:
        title = "t " * random.choice((500, 5000, 100_000))
        return self._post(UPLOAD, {"documents": [{"id": "titled", "title": title, "text": f"words {random.random()}"}]})

    def _send_huge(self) -> int:
        return self._post(random.choice((UPLOAD, CHAT)), self._huge)

    def _salt(self) -> int:
        return self._chat(random.choice(QUESTIONS), cache_salt=f"salt-{random.random()}", max_tokens=64)

    def _drop(self) -> int:
        return self._chat(" ".join(random.choices(WORDS, k=300)), timeout_s=random.uniform(0.05, 0.5), max_tokens=64)

    def _long_question(self) -> int:
        return self._chat("word " * 20_000)

    def _idle(self) -> None:
        host, port = self._address.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for number in range(IDLE_CONNECTIONS):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
                if number % 2:
                    connection.sendall(b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n")
            self._stop.wait(10)


def be_hostile() -> int:
    """The process of the hostile clients: attacks from its first line on stdin, which says whom, until the second one."""
    os.nice(10)
    hostile = HostileTenant(**json.loads(sys.stdin.readline()))
    hostile.start()
    sys.stdin.readline()
    print(json.dumps(hostile.stop()))
    sys.stdout.flush()
    os._exit(0)  # idle connections and calls that hang end with the process


@contextlib.contextmanager
def attacked(address: str, key: str, model: str, without: Collection[str], answers: dict[str, Any]) -> Iterator[None]:
    """The hostile tenant's process beside the block; what it was answered is in `answers` after it."""
    command = [sys.executable, str(Path(__file__).resolve()), BE_HOSTILE]
    whom = {"address": address, "key": key, "model": model, "without": list(without)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(whom) + "\n")
        process.stdin.flush()
        try:
            yield
            answers.update(json.loads(process.communicate("\n", timeout=2 * TIMEOUT_S)[0]))
        finally:
            process.kill()


@contextlib.contextmanager
def served(folder: Path, keys: dict[str, str], model: str) -> Iterator[tuple[str, int]]:
    """Serve these tenants in a process of its own; gives the address and the process's id."""
    tables = "".join(f'[tenants.{name}]\napi_key_sha256 = ["{hash_key(key)}"]\n' for name, key in keys.items())
    # Budgets are filled by both tenants, as they should be: small ones, so that memory beside them is seen.
    settings = f'store_dir = "{folder / "store"}"\nram_budget_bytes = {BUDGET}\nprefix_budget_bytes = {BUDGET}\n'
    (folder / "serve.toml").write_text(settings + tables, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "cacheblend.cli.main", "serve", "--config", str(folder / "serve.toml")]
    command += ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    log, address = folder / "serve.log", f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while not is_ready(address):
            if process.poll() is not None:
                raise RuntimeError(f"`cacheblend serve` ended before it was ready:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield address, process.pid
    finally:
        process.terminate()
        try:
            process.wait(2 * TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    """Whether a server answers requests."""
    try:
        return httpx.get(f"{address}/readyz", timeout=5).is_success
    except httpx.HTTPError:
        return False


def resident_mib(pid: int) -> float:
    """`VmRSS` of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def attack(
    folder: Path, seconds: float, model: str, without: Collection[str] = (), documents: int = DOCUMENTS
) -> dict[str, Any]:
    """Both phases; the figures."""
    keys = {name: new_key() for name in ("good", "hostile")}
    with served(folder, keys, model) as (address, pid):
        headers = {"Authorization": f"Bearer {keys['good']}"}
        with httpx.Client(base_url=address, timeout=TIMEOUT_S, headers=headers) as client:
            name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            texts = [dict(document) for document in handbook_documents()[:documents]]
            client.post(UPLOAD, json={"documents": texts}, timeout=10 * TIMEOUT_S).raise_for_status()
            good = GoodTenant(client, name)
            if seconds >= WARM_S:
                with attacked(address, keys["hostile"], name, without, {}):
                    good.ask_for(WARM_S)
                time.sleep(SETTLE_S)
            good.ask_for(2.0)
            good = GoodTenant(client, name)
            alone, _ = good.ask_for(max(3.0, seconds / 10))
            alone_stages = good.take_stages()
            before = resident_mib(pid)
            answers: dict[str, Any] = {}
            with attacked(address, keys["hostile"], name, without, answers):
                time.sleep(HOSTILE_START_S)
                under_attack, healthz = good.ask_for(seconds)
                attacked_stages = good.take_stages()
            time.sleep(min(SETTLE_S, seconds))
            after = resident_mib(pid)
            alone += good.ask_for(max(3.0, seconds / 10))[0]
            for stage, seconds_of in good.take_stages().items():
                alone_stages[stage] += seconds_of
    figures = {
        "seconds": seconds,
        "answers": len(under_attack),
        "healthz_worst_s": round(max(healthz, default=0.0), 3),
        "ttft_alone_s": round(median(alone or [0.0]), 4),
        "ttft_attacked_s": round(median(under_attack or [TIMEOUT_S]), 4),
        "stages_alone": {name: round(median(values or [0.0]), 4) for name, values in alone_stages.items()},
        "stages_attacked": {name: round(median(values or [0.0]), 4) for name, values in attacked_stages.items()},
        "time_outs": good.time_outs,
        "failures": len(good.failures),
        "first_failures": good.failures[:3],
        "rss_before_mib": round(before, 1),
        "rss_after_mib": round(after, 1),
        "rss_growth": round(after / before - 1, 3),
        "hostile": answers,
    }
    figures["ttft_ratio"] = round(figures["ttft_attacked_s"] / max(1e-9, figures["ttft_alone_s"]), 2)
    return {**figures, "holds": all(figures[name] <= bound for name, bound in BOUNDS.items())}


def main() -> int:
    """Run it; 1 where a bound does not hold."""
    if BE_HOSTILE in sys.argv[1:]:
        return be_hostile()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="see `cacheblend serve --help` (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of the good tenant (default: %(default)s)")
    parser.add_argument("--without", action="append", default=[], help="an attack to leave out, such as 'huge bodies'")
    parser.add_argument("--json", action="store_true", help="one JSON object alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = attack(Path(folder), options.seconds, options.model, options.without, options.documents)
    if not options.json:
        for name, value in figures.items():
            bound = f"  (at most {BOUNDS[name]:g})" if name in BOUNDS else ""
            print(f"{name:18} {value}{bound}", file=sys.stderr)
    print(json.dumps(figures))
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
