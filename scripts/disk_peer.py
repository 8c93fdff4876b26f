"""Reads of a disk without the loader: the peers of `bench_loader.py`."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cacheblend.loader.profiler import drop_page_cache


def fio_rate(fio: str, files: list[Path], block: int, jobs: int, direct: bool) -> float:
    """What fio reads: the files in order, one block at a time."""
    drop_page_cache(files)
    shares = [files[job::jobs] for job in range(jobs)]
    arguments = ["--ioengine=psync", f"--direct={int(direct)}", "--rw=read", f"--bs={block}", "--output-format=json"]
    arguments += ["--file_service_type=sequential"]
    for number, share in enumerate(shares):
        if share:
            arguments += [f"--name=job{number}", f"--filename={':'.join(map(str, share))}"]
    output = subprocess.run([fio, "--readonly", *arguments], check=True, capture_output=True, text=True).stdout
    done = json.loads(output[output.index("{") :])["jobs"]
    return float(sum(job["read"]["io_bytes"] for job in done) / (max(job["read"]["runtime"] for job in done) / 1000))


def reader_rate(files: list[Path], block: int, jobs: int) -> float:
    """What plain reads of the same files give, as many at once."""
    drop_page_cache(files)

    def read(path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer, done = mmap.mmap(-1, block), 0
        while count := os.preadv(fd, [buffer], done):
            done += count
            if count < block:
                break
        os.close(fd)
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        total = sum(pool.map(read, files))
    return total / (time.perf_counter() - started)
