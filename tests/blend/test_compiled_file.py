"""Compiled files: kept once, loaded only if nobody else could have written them, and done without where that fails."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend.blend import compiled_file
from cacheblend.blend.compiled_file import find_compiler, load_compiled

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C file of one function, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_file, "FLAGS", ("-shared", "-fPIC"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return ANSWER; }\n")
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of every compiling."""
    commands: list[str] = []
    compile_really = compiled_file._compile

    def count(command: list[str]) -> None:
        commands.append(" ".join(command))
        compile_really(command)

    monkeypatch.setattr(compiled_file, "_compile", count)
    return commands


def answer(source: Path, number: int = 42) -> int:
    """What the compiled function gives."""
    compiler = find_compiler()
    assert compiler is not None
    return int(load_compiled(compiler, source, [f"-DANSWER={number}"]).answer())


def kept(tmp_path: Path) -> list[Path]:
    """Files in the cache."""
    return [path for path in tmp_path.joinpath("cache").rglob("*") if path.is_file()]


def test_modes(source: Path, compiled: list[str], tmp_path: Path) -> None:
    """Folder and file are their owner's alone even with the widest umask, and the file serves the next process."""
    before = os.umask(0)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    (file,) = kept(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]
    assert answer(source) == 42
    assert len(compiled) == 1


def test_name(source: Path, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source, macro, processor or compiler has a file of its own, so that machines may share a home."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiled_file, "CPUINFO", cpuinfo)
    for text in ("flags : avx2\ncpu MHz : 1\n", "flags : avx2\ncpu MHz : 2\n", "flags : avx2 avx512f\n", "Features : sve\n"):
        cpuinfo.write_text(text)
        assert answer(source) == 42
    assert len(compiled) == 3  # a clock is no other processor
    cpuinfo.unlink()
    for machine in ("a", "b"):
        monkeypatch.setattr(compiled_file.platform, "node", lambda machine=machine: machine)
        assert answer(source) == 42
    assert len(compiled) == 5
    assert answer(source, 7) == 7
    source.write_text(source.read_text().replace("ANSWER", "1 + ANSWER"))
    assert answer(source) == 43
    assert len(kept(tmp_path)) == len(compiled) == 7
    wrapper = tmp_path / "cc"
    for comment in ("", "# another version\n"):
        wrapper.write_text(f'#!/bin/sh\n{comment}exec {find_compiler()} "$@"\n')
        wrapper.chmod(0o755)
        load_compiled(wrapper, source, ["-DANSWER=1"])
    assert len(compiled) == 9


ATTACKS: dict[str, Callable[[Path], object]] = {
    "others write to the file": lambda file: file.chmod(0o622),
    "others exchange the file": lambda file: file.parent.chmod(0o777),
    "others exchange the folder": lambda file: file.parent.parent.chmod(0o775),
    "another owner": lambda file: os.chown(file, 12345, -1),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_others_can_write_is_not_loaded(source: Path, compiled: list[str], tmp_path: Path, attack: str) -> None:
    """A file that somebody else may have written or exchanged is not loaded; the one compiled now is."""
    if attack == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    assert answer(source) == 42
    (file,) = kept(tmp_path)
    other = tmp_path / "other.so"
    compiler = find_compiler()
    subprocess.run([str(compiler), "-shared", "-fPIC", "-DANSWER=666", str(source), "-o", str(other)], check=True)
    digest = compiled_file._digest(other.read_bytes())
    planted = file.with_name(f"{file.stem.rsplit('-', 1)[0]}-{digest}.so")
    file.unlink()
    shutil.copyfile(other, planted)
    planted.chmod(0o600)
    assert answer(source) == 666  # this user may
    ATTACKS[attack](planted)
    assert answer(source) == 42
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"half"], ids=["empty", "zeros", "half"])
def test_damaged_file_is_made_again(source: Path, compiled: list[str], tmp_path: Path, damage: bytes) -> None:
    """What a power cut left of a file is not loaded, and replaced."""
    assert answer(source) == 42
    (file,) = kept(tmp_path)
    content = file.read_bytes()
    file.unlink()  # it is still loaded, under its old content
    file.write_bytes(content[: len(content) // 2] if damage == b"half" else damage)
    file.chmod(0o600)
    assert answer(source) == 42
    assert len(compiled) == 2
    assert [path.read_bytes() == content for path in kept(tmp_path)] == [True]


@pytest.mark.parametrize("hindrance", ["file", "read-only"])
def test_cache_that_cannot_be_written(
    source: Path, compiled: list[str], tmp_path: Path, hindrance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder to write to each process compiles for itself, and leaves nothing."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if hindrance == "file":
        cache.touch()
    else:
        if os.geteuid() == 0:
            pytest.skip("root writes to any folder")
        cache.mkdir(mode=0o500)
    assert answer(source) == 42
    assert answer(source) == 42
    assert len(compiled) == 2
    assert list(temporary.iterdir()) == []


def test_processes_at_once(source: Path, tmp_path: Path) -> None:
    """Several processes that compile at once all get the function, and one file stays."""
    code = (
        "import sys; from pathlib import Path; from cacheblend.blend import compiled_file as c; c.FLAGS = ('-shared', '-fPIC');"
        "print(c.load_compiled(c.find_compiler(), Path(sys.argv[1]), ['-DANSWER=42']).answer())"
    )
    command = [sys.executable, "-c", code, str(source)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["42", "42"]
    assert len(kept(tmp_path)) == 1


def test_compiler_hangs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that hangs is ended with the programs that it started."""
    fifo, compiler = tmp_path / "fifo", tmp_path / "cc"
    os.mkfifo(fifo)
    compiler.write_text(f"#!/bin/sh\nsleep 1000 > {fifo} &\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compiled_file, "COMPILE_S", 1.0)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        load_compiled(compiler, source, [])
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # the end of file comes once no program holds it
    os.close(reader)


def test_compiler_fails(source: Path, tmp_path: Path) -> None:
    """What the compiler says is in the error, and nothing is kept."""
    source.write_text("#error not on this machine\n")
    with pytest.raises(OSError, match="not on this machine"):
        answer(source)
    assert kept(tmp_path) == []
