"""Uploads as jobs: followed, cancelled, bounded, and independent of the connection that brought them."""

import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import bearer, serving, serving_tenants
from browser import ONCE, open_page
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.http.ingests import Ingests
from cacheblend.service.serving.scheduler import ServingConfig

TEXT = b"The lighthouse at Kap Arkona was built by Karl Friedrich Schinkel. "
GOING_ON = ("waiting", "running")


def post(client: httpx.Client, *names: str, raw: bytes = TEXT, **headers: Any) -> httpx.Response:
    """Upload files of one text."""
    return client.post("/v1/documents", files=[("file", (name, raw)) for name in names], headers=headers)


def ended(client: httpx.Client, started: httpx.Response) -> dict[str, Any]:
    """A job as it is at its end."""
    assert started.status_code == 202, started.text
    jobs = list[dict[str, Any]]()

    def has_ended() -> bool:
        jobs.append(client.get(started.headers["Location"]).raise_for_status().json())
        return jobs[-1]["status"] not in GOING_ON

    wait_until(has_ended)
    return jobs[-1]


@pytest.fixture
def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No ingest goes on until the event is set."""
    going_on, ingest = threading.Event(), engine.ingest

    def hold(documents: Any, progress: Any) -> Any:
        while not going_on.wait(0.01):
            progress.check()
        return ingest(documents, progress)

    monkeypatch.setattr(engine, "ingest", hold)
    yield going_on
    going_on.set()


def test_a_job_outlives_its_connection(engine: Engine, held: threading.Event) -> None:
    """A job goes on when its client has left, is listed, and says what was ingested at its end."""
    with serving(engine) as (_, address):
        with httpx.Client(base_url=address) as leaving:
            started = post(leaving, "a.txt")
        job = started.json()
        assert (job["object"], job["name"], job["files"]) == ("ingest", "a.txt", {"done": 0, "total": 1})
        assert started.headers["Location"] == f"/v1/ingests/{job['id']}"
        with httpx.Client(base_url=address) as client:
            assert [one["id"] for one in client.get("/v1/ingests").json()["data"]] == [job["id"]]
            held.set()
            job = ended(client, started)
            assert (job["status"], job["errors"], job["report"]["added"]) == ("done", [], 1)
            assert client.get("/v1/documents/a.txt").status_code == 200


@pytest.mark.parametrize(
    ("names", "status", "failed", "added"),
    [(["a.txt", "c.txt", "b.png"], "done", ["b.png"], 2), (["a.png", "b.png"], "failed", ["a.png", "b.png"], 0)],
)
def test_a_files_error_is_in_the_job(
    client: httpx.Client, names: list[str], status: str, failed: list[str], added: int
) -> None:
    """Of several files those that cannot be read are named with the reason, and the others are ingested."""
    job = ended(client, post(client, *names))
    assert (job["status"], job["files"], job["report"]["added"]) == (status, {"done": len(names), "total": len(names)}, added)
    assert [error["file"] for error in job["errors"]] == failed
    assert (job["done"] == job["total"]) == (status == "done")
    assert all("image; describe it" in error["message"] and error["param"] == "file" for error in job["errors"]), job["errors"]


def test_faults_are_bounded(client: httpx.Client) -> None:
    """Of files with many bad lines the first are listed, and the others counted."""
    job = ended(client, post(client, "lines.jsonl", "more.jsonl", raw=b"x\n" * 300 + b'{"text": "' + TEXT.strip() + b'"}'))
    assert (job["status"], len(job["faults"])) == ("done", 102)
    more = "more lines or parts cannot be used"
    assert job["faults"][100:] == [f"lines.jsonl: 200 {more}", f"more.jsonl: 300 {more}"]


def test_jobs_are_cancelled(engine: Engine, held: threading.Event) -> None:
    """A job that waits, and one that runs, are cancelled, and leave no document and no bytes; one that has ended is a 409."""
    before = engine.retriever.ids()
    with serving(engine) as (server, address), httpx.Client(base_url=address) as client:
        running, waiting = post(client, "a.txt"), post(client, "b.txt")
        wait_until(lambda: client.get(running.headers["Location"]).json()["status"] == "running")
        assert client.get(waiting.headers["Location"]).json()["status"] == "waiting"
        for started in (waiting, running):
            assert client.delete(started.headers["Location"]).json()["status"] == "cancelled"
        wait_until(lambda: not server.uploads.is_busy)
        for job in server.ingests.of(""):
            error = job.call.future.exception()
            assert error is not None
            assert {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)} <= {"run"}
            assert (job.parts, error.__context__) == ({}, None)
        for started in (waiting, running):
            refused = client.delete(started.headers["Location"])
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ingest_ended")
        held.set()
    assert engine.retriever.ids() == before


@pytest.mark.usefixtures("held")
def test_a_stop_names_the_jobs_that_it_ends(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says which uploads have not been done, since no list has them after the service's start."""
    with serving(engine) as (server, address), httpx.Client(base_url=address) as client:
        jobs = [post(client, name).json() for name in ("a.txt", "b.txt")]
        server.give_up()
    for job in jobs:
        assert f"the stop ended the upload {job['id']} ({job['name']}); send it again" in caplog.messages


def test_jobs_are_bounded(engine: Engine, held: threading.Event) -> None:
    """Too many jobs, or too long ones, are a 429 that says what to do; of ended ones the last are remembered."""
    with (
        serving(engine, ServingConfig(max_uploads=3), max_body_bytes=8000) as (server, address),
        httpx.Client(base_url=address) as client,
    ):
        server.ingests = Ingests(4000, max_ended=2)
        jobs = [post(client, f"{number}.txt") for number in range(3)]
        for raw, words in ((TEXT, "3 uploads wait or run already"), (TEXT * 58, "too many bytes together; wait for one")):
            answer = post(client, "b.txt", raw=raw)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert (words in answer.json()["error"]["message"], "Retry-After" in answer.headers) == (True, True)
        held.set()
        for job in jobs:
            ended(client, job)
        ended(client, post(client, "last.txt"))
        assert len(client.get("/v1/ingests").json()["data"]) == 3
        assert client.get(jobs[0].headers["Location"]).status_code == 404


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_another_tenants_job(model_dir: Path, tmp_path: Path, method: str) -> None:
    """A tenant's jobs are nobody else's: not listed, and a 404 by their id, as one that never was."""
    with serving_tenants(["one", "two"], model_dir, tmp_path) as (_, address), httpx.Client(base_url=address) as client:
        started = post(client, "a.txt", **bearer("one"))
        assert client.get("/v1/ingests", headers=bearer("two")).json()["data"] == []
        for path in (started.headers["Location"], "/v1/ingests/none"):
            answer = client.request(method, path, headers=bearer("two"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ingest_not_found")


@pytest.mark.parametrize(
    ("send", "param"),
    [
        (lambda client: post(client, "a.txt", "a.txt"), "file"),
        (
            lambda client: client.post("/v1/documents", files=[("file", ("a", TEXT)), ("file", ("b", TEXT))], data={"id": "x"}),
            "id",
        ),
        (lambda client: client.post("/v1/documents?wait=perhaps", files={"file": ("a", TEXT)}), "wait"),
        (lambda client: client.post("/v1/documents", json={"documents": [{"id": "", "text": "x"}]}), None),
    ],
)
def test_what_is_no_job(client: httpx.Client, send: Callable[[httpx.Client], httpx.Response], param: str | None) -> None:
    """An upload that is wrong as such is a 400 at once, and no job."""
    answer = send(client)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert client.get("/v1/ingests").json()["data"] == []


@ONCE
def test_the_page_follows_jobs_after_a_reload(page: Any, engine: Engine, held: threading.Event) -> None:
    """An upload goes on where the page is loaded anew, which shows it until the document is there; another is cancelled."""
    with serving(engine) as (_, address):
        open_page(page, address)
        files = [{"name": name, "mimeType": "text/plain", "buffer": TEXT} for name in ("a.txt", "b.txt")]
        page.get_by_label("Add files").set_input_files(files)
        page.get_by_text("b.txt: waits for its turn").wait_for()
        page.reload()
        page.get_by_text("b.txt: waits for its turn").wait_for()
        page.get_by_role("button", name="Cancel: b.txt").click()
        page.get_by_text("b.txt: cancelled.").wait_for()
        held.set()
        page.get_by_role("button", name="a.txt", exact=True).wait_for()
        wait_until(lambda: page.locator("#uploads li").count() == 1)
