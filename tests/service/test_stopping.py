"""The server's process ends in its grace, whatever it does, and tells its clients so."""

import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from api import MODEL
from engines import DOCUMENTS, make_model
from server_process import ServedConfig, ServerProcess, free_port
from waiting import wait_until

from cacheblend.base.errors import RetrieverError, StoreFullError
from cacheblend.retriever.index import IndexedDocuments
from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.store import KVStore, StoreConfig

GRACE_S = 8.0
LONG_TEXT = " ".join(f"word{place}" for place in range(40_000))  # ten seconds and more of a small model


def upload(address: str, id_: str) -> httpx.Response:
    body = {"documents": [{"id": id_, "text": LONG_TEXT}]}
    return httpx.post(f"{address}/v1/documents?wait=true", json=body, timeout=180)


class Upload(threading.Thread):
    """An upload, and what becomes of it."""

    def __init__(self, address: str, id_: str) -> None:
        super().__init__()
        self._address, self._id = address, id_
        self.start()

    def run(self) -> None:
        self.response = upload(self._address, self._id)


def entries(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.address}/v1/store", timeout=30).json()["nvme"]["entries"])


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def config(tmp_path: Path) -> ServedConfig:
    make_model(tmp_path / "model")
    return ServedConfig(
        model=str(tmp_path / "model"), store_dir=str(tmp_path / "store"), port=free_port(), grace_s=GRACE_S, guard_share=0.0
    )


@pytest.mark.process
def test_sigterm_while_uploads_run_and_wait(config: ServedConfig, tmp_path: Path) -> None:
    """The process ends within the grace with exit code 0; both uploads are a 503 in JSON, and nothing of them is left."""
    log = tmp_path / "log"
    with ServerProcess(config, log) as server, socket.create_connection(("127.0.0.1", config.port)) as half:
        half.sendall(b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        uploads = [Upload(server.address, id_) for id_ in ("one", "two")]
        wait_until(lambda: entries(server) > 0)
        server.signal(signal.SIGTERM)
        assert server.wait(GRACE_S + 90) == 0
        for upload in uploads:
            upload.join()
            assert upload.response.status_code == 503, upload.response.text
            assert upload.response.json()["error"]["type"] == "server_error"
    folder = Path(config.store_dir)
    with KVStore(StoreConfig(directory=folder / "kv")) as store, IndexedDocuments.open(folder / "index") as index:
        assert (store.stats().nvme.entries, index.ids()) == (0, [])


@pytest.mark.process
def test_a_second_sigterm(config: ServedConfig, tmp_path: Path) -> None:
    """The process ends at once, by its own exit and not by an abort."""
    config = replace(config, grace_s=600.0)
    with ServerProcess(config, tmp_path / "log") as server:
        upload = threading.Thread(target=_fails, args=(server.address,))
        upload.start()
        wait_until(lambda: entries(server) > 0)
        server.signal(signal.SIGTERM)
        wait_until(lambda: not listens(config.port))
        server.signal(signal.SIGTERM)
        assert server.wait(90) == 128 + signal.SIGTERM  # of the ten minutes that the first one gives
        upload.join()


def _fails(address: str) -> None:
    with pytest.raises(httpx.TransportError):
        upload(address, "one")


@pytest.mark.parametrize("error", [StoreFullError("no room"), RetrieverError("no room"), OSError(28, "no room")], ids=repr)
def test_an_ordinary_end_after_a_failed_write(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What cannot be written at the end is logged, and the exit is that of a stop which was asked for."""

    def fail() -> None:
        raise error

    def serve() -> None:
        with Server(engine.config, None, HttpConfig(served_model_name=MODEL), engine=engine) as server:
            close = server.scheduler.close
            monkeypatch.setattr(server.scheduler, "close", lambda: (close(), fail()))
            raise SystemExit(0)

    with pytest.raises(SystemExit, match="0"):
        serve()
    assert "no room" in caplog.text
    assert [status.id for status in engine.documents.page()[0]] == [document["id"] for document in DOCUMENTS]
