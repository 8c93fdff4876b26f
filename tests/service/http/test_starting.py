"""The port answers from the first second, says what the service is doing, and is handed over without a gap."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from engines import OpenEngine
from waiting import wait_until

from cacheblend.base.errors import ServiceError
from cacheblend.service import Engine
from cacheblend.service.http import run as http_run
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.http.starting import Starting


@pytest.fixture
def starting() -> Iterator[Starting]:
    logging.getLogger("cacheblend").setLevel(logging.INFO)
    with Starting("127.0.0.1", 0) as one:
        yield one
    logging.getLogger("cacheblend").setLevel(logging.NOTSET)


def test_stages(starting: Starting) -> None:
    """`/readyz` is 503 with the stage that was logged last, a browser gets it as a page, and `/healthz` is 200 already."""
    assert httpx.get(f"{starting.url}/readyz").status_code == 503
    logging.getLogger("cacheblend.service").info("loading the model /secret", extra={"stage": "loading the <model>"})
    answer = httpx.get(f"{starting.url}/readyz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "the service is starting: loading the <model>"
    assert httpx.post(f"{starting.url}/v1/chat/completions", json={}).json()["error"]["code"] == "not_ready"
    page = httpx.get(starting.url)
    assert "loading the &lt;model&gt;" in page.text
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.get(f"{starting.url}/healthz").json() == {"status": "ok"}
    starting.note_progress("precompute", 3, 9)
    assert "3 of 9" in httpx.get(f"{starting.url}/readyz").json()["error"]["message"]


def test_an_engine_tells_its_stages(starting: Starting, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Opening an engine is told, and a stage holds no path."""
    with caplog.at_level(logging.INFO, "cacheblend"):
        open_engine()
    assert starting.stage == "opening the store"


def test_a_busy_port() -> None:
    """A port that is taken is refused in one line, before anything else is done."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceError, match="give another --port"):
            Starting("127.0.0.1", taken.getsockname()[1])


def test_answers_do_not_wait_for_acknowledgements(starting: Starting) -> None:
    """Nagle's algorithm is off on what is accepted: with it the first token came 40 ms after the headers."""
    starting.stop()
    without_delay: list[int] = []

    async def accept() -> None:
        def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            without_delay.append(option)
            writer.close()

        async with await asyncio.start_server(look, sock=starting.sockets[0]):
            reader, writer = await asyncio.open_connection(*starting.sockets[0].getsockname()[:2])
            await reader.read()
            writer.close()

    asyncio.run(accept())
    assert without_delay
    assert all(without_delay)


def test_hand_over(starting: Starting, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service goes on on the very socket: no connection is refused between the two."""
    seen: list[int] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            seen.append(httpx.get(f"{starting.url}/readyz", timeout=30).status_code)

    client = threading.Thread(target=poll)
    monkeypatch.setattr(http_run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(http_run.sys, "setswitchinterval", lambda _: None)
    services: list[http_run.StoppableServer] = []

    class Kept(http_run.StoppableServer):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]  # as they come
            services.append(self)

        def install_signal_handlers(self) -> None: ...

    monkeypatch.setattr(http_run, "StoppableServer", Kept)
    with Server(engine.config, http=HttpConfig(port=0), engine=engine) as server:
        serving = threading.Thread(target=http_run.run, args=(server, starting))
        client.start()
        wait_until(lambda: 503 in seen)
        serving.start()
        wait_until(lambda: 200 in seen)
        ended.set()
        client.join()
        services[0].should_exit = True
        serving.join()
    assert set(seen) == {503, 200}
    assert seen == sorted(seen, reverse=True)
