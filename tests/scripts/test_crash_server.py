"""A server that is killed under load keeps what it acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from chunks import flip_last_byte, make_chunk
from script_modules import load_script

from cacheblend.store import KVStore, StoreConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_server.py"
HELD = {"open_files": 30, "threads": 20, "objects_of_requests": 0, "resident_mib": 400}
GOOD: dict[str, Any] = {"replicas": 2, "survivor": None, "lost": 0, "damaged": 0, "remote_objects": 9, "remote_damaged": 0}


@pytest.mark.timeout(400)
def test_two_kills() -> None:
    """Killed twice, the server knows every document that it acknowledged, and answers about it from the store."""
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "2"], capture_output=True, text=True, check=False, timeout=390)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 2
    assert figures["acknowledged"] >= figures["asked"] > 0
    assert (figures["lost"], figures["damaged"]) == (0, 0)


@pytest.mark.parametrize("change", [{"lost": 1}, {"damaged": 1}, {"remote_objects": 0}, {"remote_damaged": 1}], ids=str)
def test_each_fault_shows(change: dict[str, int]) -> None:
    """Each figure that is not as it must be fails the run."""
    script = load_script("crash_server")
    assert script.faults_of(GOOD) == []
    assert script.faults_of({**GOOD, **change}) == list(change)


@pytest.mark.parametrize("name", HELD)
def test_drift_shows(name: str) -> None:
    """What a survivor holds more for good is a fault; a busy round is none, and a quiet one hides nothing."""
    script = load_script("crash_server")
    more = {**HELD, name: HELD[name] + script.SPARE[name] + 1}
    for last, faults in (([HELD, more, HELD], []), ([more, HELD, more], [name])):
        rounds = [HELD] * 6 + last
        assert script.faults_of({**GOOD, "survivor": script.drift_of(rounds)}) == faults


def test_what_a_server_does_not_list_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost is what was acknowledged and one server does not list; a deletion that a kill cut off may have been made."""
    script = load_script("crash_server")
    known = script.Acknowledged(texts={"here": "a", "gone": "b", "deleted": None, "doubtful": "c"}, doubtful={"doubtful": None})
    listed = {"http://one": {"here", "gone"}, "http://other": {"here", "doubtful"}}
    monkeypatch.setattr("acknowledged._listed", lambda client: listed[str(client.base_url).rstrip("/")])
    assert script.lost_documents(listed, known) == {"gone"}


def test_remote_damage_is_counted(tmp_path: Path) -> None:
    """Of all objects of a remote tier, those that are no entry, and those of which a layer is altered, count as damaged."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    script = load_script("crash_server")
    objects = tmp_path / "objects"
    remote = {"remote": f"file://{objects}", "remote_secret": script.SECRET}
    config = script.ServedConfig(model="", store_dir="", port=0, **remote)
    with KVStore(StoreConfig(directory=tmp_path / "store", **remote)) as store:
        for seed in range(3):
            store.put(*make_chunk(seed))
        assert store.flush_remote(60.0)
    assert script.count_remote(config) == (3, 0)
    first, second, _ = sorted(path for path in objects.rglob("*") if path.is_file())
    flip_last_byte(first)
    second.write_bytes(b"no entry")
    assert script.count_remote(config) == (3, 2)
