"""What a hostile tenant can do to a well-behaved one: in a flood, finding by finding, and by chance.

    python scripts/attack_tenants.py flood --seconds 300
    python scripts/attack_tenants.py findings --only marks schemas
    python scripts/attack_tenants.py fuzz --seconds 7200

`flood`: the good tenant of a `cacheblend serve` asks one streamed question after the other: before, during and after an attack.
The hostile one uploads (and hangs up on half of it), sends long titles, bodies of tens of megabytes, a cache salt a question,
questions whose client leaves, questions of 100,000 characters, half requests and nothing, all at once and without a pause, from
a process at niceness 10: a real tenant computes on its own machine.

`findings`: what an attack from outside has once found, each by itself; `ATTACKS` lists them. A row has the statuses that it was
answered, the server's CPU seconds, and the bounds below with `mib`, by which the server and its readers of files grew, at most
1,400. A model of 4,096 positions makes it short.

`fuzz`: the targets of `tests/fuzz` by turns, anew each time (HTTP, files, stores, remote objects), until the seconds are over.

The last line of stdout is a JSON object of figures; the exit code is 1 if one of these bounds does not hold:

`healthz_worst_s`: longest answer of `/healthz` under attack; at most 0.5, of a finding 1.
`ttft_ratio`: of the good tenant's median seconds to the first token under attack, to those before and after; at most 3.
`time_outs`, `failures`: of the good tenant's requests; 0.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import httpx

from cacheblend.blend.models import DEFAULT_MODEL
from cacheblend.service.http.config import hash_key, new_key

BOUNDS = {"healthz_worst_s": 0.5, "ttft_ratio": 3.0, "time_outs": 0, "failures": 0}
FINDING_BOUNDS: dict[str, float] = {"healthz_worst_s": 1.0, "time_outs": 0, "failures": 0, "mib": 1400}
TIMEOUT_S, HOSTILE_START_S = 30.0, 3.0
IDLE_CONNECTIONS = 200
HUGE_BYTES = 24 * 2**20
BE_HOSTILE = "--be-hostile"  # the first argument of the hostile tenant's process
CHAT, UPLOAD = "/v1/chat/completions", "/v1/documents?wait=true"
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
        until = time.monotonic() + seconds
        return self.ask_until(lambda: time.monotonic() >= until)

    def ask_until(self, is_over: Callable[[], bool]) -> tuple[list[float], list[float]]:
        """`ask_for`, until something happens."""
        stop, healthz, ttft = threading.Event(), list[float](), list[float]()
        prober = threading.Thread(target=self._probe, args=(stop, healthz), daemon=True)
        prober.start()
        while not is_over():
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


class Attacks:
    """The findings, each a method that attacks for some seconds and returns the statuses of its requests."""

    def __init__(self, address: str, key: str, model: str) -> None:
        url, headers = httpx.URL(address), {"Authorization": f"Bearer {key}"}
        self._place, self._model, self._key = (url.host, url.port), model, key
        self._client = httpx.Client(base_url=address, headers=headers, timeout=10 * TIMEOUT_S)

    def marks(self) -> list[int]:
        """Runs of a character, in what a question brings and in an upload: no pattern goes over them twice."""
        runs = [
            unit * (20_000 // len(unit))
            for unit in ("?", '!"', " ", "\n", "\n ", "#", "# ", "`", "a", "1", ".)", "\u3002", "\u0301")
        ]
        brought = [self._ask(documents=[{"text": f"{run}x"}]) for run in runs]
        return [*brought, self._file("marks.txt", b"!" * 2**15)]

    def lines(self) -> list[int]:
        """JSON lines with many values, in fields that no document has."""
        line = b'{"text": "x", "junk": [' + b"[]," * (10 * 2**20) + b"[]]}\n"
        short = b'{"text": "x", "junk": [' + b"[]," * 190_000 + b"[]]}\n"
        return [self._file("x.jsonl.gz", gzip.compress(line * 4)), self._file("x.jsonl.gz", gzip.compress(short * 16))]

    def schemas(self) -> list[int]:
        """Patterns that repeat repetitions."""
        patterns = ("^((a{1000}){1000}){1000}$", "^(((a{100}){100}){100}){100}$", "^(.{0,99}b){99}$", "(a?){9999}a{9999}")
        made = [
            {"type": "object", "properties": {"a": {"type": "string", "pattern": one}}, "required": ["a"]} for one in patterns
        ]
        made.append({"type": "object", "properties": {f"p{n}": {"enum": [f"{n}-{m}" for m in range(60)]} for n in range(60)}})
        form = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in made]
        return [self._ask(response_format=one, max_tokens=16) for one in form * 4]

    def dribble(self) -> list[int]:
        """More connections than there are, without a key: silent, with half a head, and with bodies of a byte a second."""
        post = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n"
        get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n"
        keyed = post + f"Authorization: Bearer {self._key}\r\n\r\n".encode()
        with contextlib.ExitStack() as stack:
            connections = []
            for number in range(900):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.create_connection(self._place, timeout=TIMEOUT_S))
                    connection.sendall((get, post + b"\r\n", post, keyed, b"")[number % 5])
                    connections.append(connection)
            for _ in range(8):
                time.sleep(1)
                for connection in connections:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"1")
        return []

    def leaves(self) -> list[int]:
        """Whole answers of many tokens, whose clients leave; a moment later nothing of them is decoded."""
        for _ in range(3):
            with contextlib.suppress(httpx.TimeoutException):
                body = {"model": self._model, "prompt": "word", "n": 4, "max_tokens": 20_000, "ignore_eos": True}
                self._client.post("/v1/completions", json=body, timeout=1.5)
        time.sleep(3)
        busy = [line for line in self._client.get("/metrics").text.splitlines() if line.startswith("cacheblend_requests_now")]
        return [sum(int(float(line.split()[-1])) for line in busy)]

    def bombs(self) -> list[int]:
        """Files that unpack to much, or have a cell in the last row of the last column."""
        rows = '<sheetData><row r="1048576"><c r="XFD1048576"><v>1</v></c></row></sheetData>'
        kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
        space, of = "http://schemas.openxmlformats.org", "officeDocument/2006/relationships"
        sheet = {
            "[Content_Types].xml": f'<Types xmlns="{space}/package/2006/content-types"><Default Extension="rels" ContentType='
            f'"application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/xl/workbook.xml" ContentType='
            f'"{kind}.sheet.main+xml"/><Override PartName="/s.xml" ContentType="{kind}.worksheet+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{space}/package/2006/relationships"><Relationship Id="r" Type="{space}/{of}'
            '/officeDocument" Target="xl/workbook.xml"/></Relationships>',
            "xl/workbook.xml": f'<workbook xmlns="{space}/spreadsheetml/2006/main" xmlns:r="{space}/{of}"><sheets><sheet '
            'name="S" sheetId="1" r:id="r"/></sheets></workbook>',
            "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{space}/package/2006/relationships"><Relationship Id="r" '
            f'Type="{space}/{of}/worksheet" Target="/s.xml"/></Relationships>',
            "s.xml": f'<worksheet xmlns="{space}/spreadsheetml/2006/main">{rows}</worksheet>',
        }
        files = {
            "cell.xlsx": _zipped(sheet),
            "text.docx": _zipped({"word/document.xml": "<w>" + "a" * (200 * 2**20)}),
            "tags.html": b"<p " + b"a=1 " * (4 * 2**20) + b">x",
            "deep.html": b"<table><tr><td>" * 2000 + b"x",
        }
        return [self._file(name, raw) for name, raw in files.items()]

    def logprobs(self) -> list[int]:
        """Log-probabilities of all tokens of all choices."""
        body = {"model": self._model, "prompt": "word", "n": 12, "max_tokens": 400, "logprobs": 20, "temperature": 1.0}
        return [self._client.post("/v1/completions", json=body).status_code]

    def long(self) -> list[int]:
        """Eight million characters, each some tokens; the client leaves."""
        with contextlib.suppress(httpx.TimeoutException):
            self._client.post(
                "/v1/documents?wait=true", files={"file": ("long.txt", ("\u6c34\u706b\u5730" * 930_000).encode())}, timeout=20
            )
        return [self._client.get("/readyz").status_code]

    def scrapes(self) -> list[int]:
        """Twenty loops of `/metrics` without a key."""
        until, statuses = time.monotonic() + 5, set[int]()

        def loop() -> None:
            with httpx.Client(base_url=self._client.base_url, timeout=TIMEOUT_S) as client:
                while time.monotonic() < until:
                    statuses.add(client.get("/metrics").status_code)

        threads = [threading.Thread(target=loop) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(statuses)

    def silent(self) -> list[int]:
        """Tokens without text, by a bias."""
        return [self._ask(logit_bias={str(token): 100}, max_tokens=300, num_chunks=0) for token in (0, 1, 2)]

    def framing(self) -> list[int]:
        """A body of two lengths, with a second request behind the shorter one."""
        common = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
        head, second = f"POST {CHAT} {common}Content-Type: application/json\r\n", f"GET {UPLOAD} {common}\r\n"
        with socket.create_connection(self._place, timeout=TIMEOUT_S) as connection:
            connection.sendall(f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}".encode())
            answers = b"".join(iter(lambda: connection.recv(2**16), b""))
        return [int(part[:3]) for part in answers.decode().split("HTTP/1.1 ")[1:]]

    def _ask(self, **options: Any) -> int:
        body = {"model": self._model, "messages": [{"role": "user", "content": "What?"}], "max_tokens": 2, **options}
        return self._client.post(CHAT, json=body).status_code

    def _file(self, name: str, raw: bytes) -> int:
        return self._client.post(UPLOAD, files={"file": (name, raw)}).status_code


def _zipped(members: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return packed.getvalue()


# By name, with the statuses that are right; of `leaves`, the requests that are left, with the good tenant's.
ATTACKS: dict[str, tuple[Callable[[Attacks], list[int]], set[int]]] = {
    "marks": (Attacks.marks, {200, 201, 400}),
    "lines": (Attacks.lines, {400}),
    "schemas": (Attacks.schemas, {200, 400}),
    "dribble": (Attacks.dribble, set()),
    "leaves": (Attacks.leaves, {0, 1}),
    "bombs": (Attacks.bombs, {201, 400}),
    "logprobs": (Attacks.logprobs, {200}),
    "long": (Attacks.long, {200}),
    "scrapes": (Attacks.scrapes, {200}),
    "silent": (Attacks.silent, {200}),
    "framing": (Attacks.framing, {400}),
}


class Usage(threading.Thread):
    """Samples the memory of a process and of all below it, and its own CPU time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ends = pid, threading.Event()
        self.began_mib, self.worst_mib = self._mib(), 0.0
        self._began_s = self._cpu_s()

    def run(self) -> None:
        """Sample until `end`."""
        while not self._ends.wait(0.05):
            self.worst_mib = max(self.worst_mib, self._mib())

    def end(self) -> tuple[float, float]:
        """MiB by which it grew at most, and CPU seconds."""
        self._ends.set()
        self.join()
        return self.worst_mib - self.began_mib, self._cpu_s() - self._began_s

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def _mib(self) -> float:
        below, pages = {self._pid}, 0
        for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: int(one.name)):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(folder.name) in below or int(fields[1]) in below:
                    below.add(int(folder.name))
                    pages += int((folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def try_findings(address: str, keys: dict[str, str], pid: int, names: Sequence[str]) -> dict[str, Any]:
    """Attack by each finding while the good tenant asks; a row for each."""
    rows: dict[str, dict[str, Any]] = {}
    with httpx.Client(base_url=address, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {keys['good']}"}) as client:
        model = prepare(client)
        for name in names:
            attack_by, right = ATTACKS[name]
            good, usage, ended = GoodTenant(client, model), Usage(pid), threading.Event()
            figures: list[tuple[list[float], list[float]]] = []
            asking = threading.Thread(
                target=lambda good=good, ended=ended, to=figures: to.append(good.ask_until(ended.is_set)), daemon=True
            )
            for thread in (usage, asking):
                thread.start()
            statuses = sorted(set(attack_by(Attacks(address, keys["hostile"], model))))
            ended.set()
            asking.join()
            (mib, cpu_s), (ttft, healthz) = usage.end(), figures[0]
            row: dict[str, Any] = {
                "statuses": statuses,
                "healthz_worst_s": round(max(healthz), 2),
                "ttft_worst_s": round(max(ttft), 2),
                "time_outs": good.time_outs,
                "failures": good.failures,
                "mib": round(mib),
                "cpu_s": round(cpu_s, 1),
            }
            is_right = bool(statuses) == bool(right) and set(statuses) <= right
            row["holds"] = is_right and all(row[bounded] <= bound for bounded, bound in FINDING_BOUNDS.items())
            rows[name] = row
            print(f"{name:10}", *(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def fuzz(seconds: float) -> dict[str, Any]:
    """Run the targets of `tests/fuzz` by turns, with new examples each time, until the time is over."""
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests / folder) for folder in ("", "fuzz", "service", "store")]
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from targets import TARGETS  # type: ignore[import-not-found]  # of the folder above

    until, examples = time.monotonic() + seconds, dict.fromkeys(TARGETS, 0)
    while time.monotonic() < until:
        for name, (checks, few) in TARGETS.items():
            with checks() as check:

                @settings(max_examples=10 * few, database=None, deadline=None, suppress_health_check=list(HealthCheck))
                @given(data=st.data())
                def run(check: Callable[[st.DataObject], None], name: str, data: st.DataObject) -> None:
                    check(data)
                    examples[name] += 1

                run(check, name)
    return {"examples": examples}


def prepare(client: httpx.Client) -> str:
    """Ingest the good tenant's documents; the model's name."""
    model = str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
    documents = [{"id": f"t{number}", "text": text} for number, text in enumerate(TEXTS)]
    client.post(UPLOAD, json={"documents": documents}, timeout=20 * TIMEOUT_S).raise_for_status()
    GoodTenant(client, model).ask_for(2.0)
    return model


def attack(address: str, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    """Ask before, during and after the attack; the figures."""
    with httpx.Client(base_url=address, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {keys['good']}"}) as client:
        model = prepare(client)
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
def served(folder: Path, keys: dict[str, str], model: str) -> Iterator[tuple[str, int]]:
    """The address of a server with these tenants, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tables = "".join(f'[tenants.{name}]\napi_key_sha256 = ["{hash_key(key)}"]\n' for name, key in keys.items())
    (folder / "serve.toml").write_text(f'store_dir = "{folder / "store"}"\n{tables}', encoding="utf-8")
    command = [sys.executable, "-m", "cacheblend", "serve", "--model", model, "--port", str(port)]
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
        yield f"http://127.0.0.1:{port}", process.pid
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
    parser.add_argument("what", choices=("flood", "findings", "fuzz"), nargs="?", default="flood")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="see `cacheblend serve --help`")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood, or of fuzzing (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="findings; all by default")
    options = parser.parse_args()
    if options.what == "fuzz":
        print(json.dumps(fuzz(options.seconds)))
        return 0
    keys = {name: new_key() for name in ("good", "hostile")}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), keys, options.model) as (address, pid):
        if options.what == "flood":
            figures = attack(address, keys, options.seconds)
            holds = all(figures[name] <= bound for name, bound in BOUNDS.items())
        else:
            figures = try_findings(address, keys, pid, options.only)
            holds = all(row["holds"] for row in figures.values())
    print(json.dumps({**figures, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
