"""Compiled C files: made once for a processor, cached, and loaded only if nobody else could have written them.

A file's name has a digest of its inputs (source, flags, compiler, processor) and a digest of its content. So machines that
share a home folder do not load each other's files, and a damaged file is made again. If the cache cannot be written, or others
may write to it, each process compiles for itself.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cacheblend.base.files import make_folder, replacing, user_cache_folder

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
COMPILE_S = 60.0  # a compiler that runs longer hangs
CPUINFO = Path("/proc/cpuinfo")
# Lines of /proc/cpuinfo that `-march=native` may depend on, by their names on x86 and ARM.
_PROCESSOR_LINES = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU variant", "CPU part")
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}  # of a function's arguments
logger = logging.getLogger(__name__)
_Kernel = TypeVar("_Kernel")


def find_compiler() -> Path | None:
    """The system's C compiler; None if there is none."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return None if found is None else Path(found)


def has_feature(flag: str) -> bool:
    """Whether the processor has an instruction set, by the system's name for it."""
    return any(flag in line.partition(":")[2].split() for line in _features())


def load_or_warn(
    source: Path,
    defines: Sequence[str],
    make: Callable[[ctypes.CDLL], _Kernel],
    instead: str,
    error_of: Callable[[_Kernel], float] = lambda _: 0.0,
    allowed: float = 0.0,
) -> _Kernel | None:
    """The kernel of a C file; None if it cannot be compiled or loaded, with a warning unless there is no compiler.

    Args:
        source: the file.
        defines: macros, as compiler flags.
        make: the kernel of the compiled file; an OSError says that it cannot run here.
        instead: the consequence of going without it, for the warning.
        error_of: the largest error of its outputs in a small case.
        allowed: a kernel with a larger error is not used.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        kernel = make(load_compiled(compiler, source, defines))
        if not (off := error_of(kernel)) <= allowed:  # NaN is refused too
            raise OSError(f"as it was compiled it is off by {off:.2g}")
        return kernel
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s is not used, %s: %s", source.name, instead, error)
        return None


def function(library: ctypes.CDLL, name: str, arguments: str, *, fails: bool = False) -> Any:
    """A function of a compiled file, which returns nothing, or if it can fail a number that is not 0 then.

    `arguments` has a letter for each argument's C type: p a pointer, l int64_t, i int, f float.
    """
    call = getattr(library, name)
    call.restype, call.argtypes = ctypes.c_int if fails else None, [_KINDS[kind] for kind in arguments]
    return call


def load_compiled(compiler: Path, source: Path, defines: Sequence[str]) -> ctypes.CDLL:
    """Load a C file as a library of this process; compile it with the given macros at its first use.

    Raises:
        OSError: it cannot be compiled or loaded; the system's error, or the compiler's.
        subprocess.TimeoutExpired: the compiler hangs.
    """
    folder = user_cache_folder() / "compiled"
    name = f"{source.stem}-{_depends_on(compiler, source, defines)}"
    found = _find_compiled(folder, name)
    if found is not None:
        return ctypes.CDLL(str(found))
    with tempfile.TemporaryDirectory() as directory:  # only this user may write to it
        made = Path(directory) / f"{name}.so"
        _compile([str(compiler), *FLAGS, *defines, str(source), "-lm", "-o", str(made)])
        try:
            made = _keep(made, folder, name)  # the temporary folder may forbid to run its files
        except OSError as error:
            logger.warning("%s is compiled again by every process, as its result cannot be kept: %s", source.name, error)
        return ctypes.CDLL(str(made))


def _find_compiled(folder: Path, name: str) -> Path | None:
    """Find an undamaged file of that name in a folder that others cannot write to."""
    with suppress(OSError):
        folder = folder.resolve(strict=True)
        for path in folder.glob(f"{name}-*.so"):
            _check_private(path)
            if path.name == f"{name}-{_digest(path.read_bytes())}.so":
                return path
            path.unlink()
    return None


def _keep(made: Path, folder: Path, name: str) -> Path:
    """Put a compiled file into the cache atomically, and return its place; other processes may do so at the moment."""
    make_folder(folder)
    folder = folder.resolve()
    _check_private(folder)
    content = made.read_bytes()
    with replacing(path := folder / f"{name}-{_digest(content)}.so") as file:
        file.write(content)
    return path


def _check_private(path: Path) -> None:
    """Raise a PermissionError unless only this user and root may write to a file or exchange it."""
    for each in (path, *path.parents):
        status = each.stat()
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # others cannot exchange its files
        if status.st_uid not in (0, os.geteuid()) or (shared and not sticky):
            raise PermissionError(f"others may write to {each}: make this user its owner, and `chmod go-w` it")


def _compile(command: Sequence[str]) -> None:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            _, errors = process.communicate(timeout=COMPILE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler starts programs of its own
            raise
    if process.returncode:
        last = next((line for line in errors.splitlines() if "error" in line), errors[-200:])
        raise OSError(f"{command[0]} ended with status {process.returncode}: {last}")


def _depends_on(compiler: Path, source: Path, defines: Sequence[str]) -> str:
    """A digest of source, compiler, flags and processor."""
    program = compiler.resolve()
    status = program.stat()  # another version has another size or time
    # On a system that does not list its processor's features, the machine's name.
    processor = "\n".join(sorted(_features())) or f"{platform.processor()} of {platform.node()}"
    known = [str(program), str(status.st_size), str(status.st_mtime_ns), *FLAGS, *defines, platform.machine(), processor]
    return _digest("\0".join(known).encode() + b"\0" + source.read_bytes())


def _features() -> set[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return {line for line in lines if line.partition(":")[0].strip() in _PROCESSOR_LINES}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
