"""What is left to code that has taken over the process that reads a file: the file alone, by calls of the system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFINED = """
import ctypes, json, os, sys
from pathlib import Path
from cacheblend.service.engine.confinement import confine
own, other, parent = Path(sys.argv[1]), os.fsencode(sys.argv[2]), os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
reading, writing = os.pipe()
sys.path.append(str(own.parent))
lacks = confine(own)
tries = {
    "read another file": lambda: libc.open(other, os.O_RDONLY),
    "write another file": lambda: libc.open(other, os.O_WRONLY),
    "write its own file": lambda: libc.open(os.fsencode(own), os.O_WRONLY),
    "make a file": lambda: libc.open(other + b".new", os.O_WRONLY | os.O_CREAT, 0o600),
    "cut a file": lambda: libc.truncate(other, 0),
    "change a mode": lambda: libc.chmod(other, 0),
    "link a file": lambda: libc.link(other, other + b".link"),
    "list a folder": lambda: libc.open(os.path.dirname(other), os.O_RDONLY | os.O_DIRECTORY),
    "open a socket": lambda: libc.socket(2, 1, 0),
    "open a Unix socket": lambda: libc.socketpair(1, 1, 0, buffer),
    "start a program": lambda: libc.execve(b"/bin/true", None, None),
    "start a process": lambda: libc.fork(),
    "signal another process": lambda: libc.kill(parent, 0),
    "have another process signalled": lambda: libc.fcntl(writing, 8, parent),
    "choose the signal": lambda: libc.fcntl(writing, 10, 9),
    "set it off": lambda: libc.fcntl(writing, 4, os.O_ASYNC | os.O_WRONLY),
    "bound another process": lambda: libc.prlimit(parent, 7, None, buffer),
    "read another process": lambda: libc.process_vm_readv(parent, None, 0, None, 0, 0),
    "leave its group": lambda: libc.setsid(),
    "raise its own bounds": lambda: libc.setrlimit(7, buffer),
    "remove a file": lambda: libc.unlink(other),
    "rename a file": lambda: libc.rename(other, other + b".old"),
    "tell others": lambda: libc.shmget(1, 4096, 0o1600),
}
os.close(os.dup(writing))
print(json.dumps({"lacks": lacks, "own": own.read_text(), "works": [name for name, call in tries.items() if call() >= 0]}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux has for it")
def test_code_in_the_reader_has_its_own_file_alone(tmp_path: Path) -> None:
    """By calls of the C library, which no hook of Python sees: nothing but its own file and Python's libraries is reached."""
    own, other = tmp_path / "own.txt", tmp_path / "other.txt"
    own.write_text("own words")
    other.write_text("of another tenant")
    command = [sys.executable, "-c", CONFINED, str(own), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    if found["lacks"]:
        pytest.skip(str(found["lacks"]))
    assert (found["works"], found["own"]) == ([], "own words")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", "own.txt"]
    assert other.read_text() == "of another tenant"
