"""Confinement of a process that reads one untrusted file: limits of the system, seccomp, Landlock, and a hook of Python's.

seccomp leaves the calls of `CALLS`: no socket, program, process, thread or signal, nothing that changes a file or another
process. Landlock leaves the file and the folders of Python, of installed packages and of those imported, which import some of
their parts late, and no other folder of `sys.path`. Both are of Linux and bind the process for good, whoever runs in it. The
hook refuses only Python's calls, elsewhere too.
"""

import ctypes
import errno
import fcntl
import os
import resource
import site
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_MEMORY_BYTES = 2**30  # of address space, of which the libraries take 0.3 GiB
MAX_CPU_S = 120
SYSTEM_LIBRARIES = ("/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo")
CALLS = (
    *("read", "pread64", "readv", "write", "writev", "close", "lseek", "dup", "poll", "ppoll", "select", "pselect6"),
    *("open", "openat", "stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"),
    *("readlink", "readlinkat", "getcwd", "getdents64", "mmap", "munmap", "mprotect", "mremap", "madvise", "brk"),
    *("futex", "sched_yield", "sched_getaffinity", "clock_gettime", "clock_getres", "gettimeofday", "clock_nanosleep"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "getrandom", "getpid", "gettid", "getuid", "geteuid"),
    *("nanosleep", "getgid", "getegid", "getrusage", "uname", "sysinfo", "exit", "exit_group"),
)
MEANS = ("landlock", "seccomp")
# Of fcntl; others have the system send any signal to any process of the user.
FCNTL_COMMANDS = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS  # as an older system has it; libraries have another way for that
CREATE_RULES, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's calls, on every processor
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # that a version of Landlock knows; from 5 on 16
NO_SIGNALS_OR_SOCKETS = 3  # to other processes; versions from 6 on know it
SET_NO_NEW_PRIVILEGES = 38
EQUAL = 4  # seccomp's comparison


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _Argument(ctypes.Structure):
    _fields_ = (("place", ctypes.c_uint), ("comparison", ctypes.c_int), ("value", ctypes.c_uint64), ("unused", ctypes.c_uint64))


def confine(file: Path) -> list[str]:
    """Leave this process, for good, no file but `file` and Python's libraries, no network, and no other process.

    Returns what this system does not have of it.
    """
    lacks = []
    for name, value in (("FSIZE", 0), ("CORE", 0), ("CPU", MAX_CPU_S), ("AS", MAX_MEMORY_BYTES)):
        with suppress(ValueError, OSError):  # as a system has them
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    for means, bind in zip(MEANS, (_by_landlock, _by_seccomp), strict=True):
        try:
            bind(file)
        except (OSError, AttributeError):
            lacks.append(means)
    sys.addaudithook(_refuse)
    return lacks


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(("socket.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.")):
        raise PermissionError(f"{event}: a document asked for what it may not have")


def _by_landlock(file: Path) -> None:
    """Restrict what is read by Landlock; OSError where the system has none."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: Any) -> int:
        if (result := int(libc.syscall(ctypes.c_long(number), *arguments))) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    version = call(CREATE_RULES, None, ctypes.c_size_t(0), 1)
    handled = (ctypes.c_uint64 * 3)((1 << RIGHTS.get(version, 16)) - 1, 0, NO_SIGNALS_OR_SOCKETS)
    rules = call(CREATE_RULES, ctypes.byref(handled), ctypes.c_size_t(24 if version >= 6 else 8), 0)
    for path in {file, *map(Path, (*SYSTEM_LIBRARIES, *_library_folders()))}:
        with suppress(OSError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = READ_FILE | READ_FOLDER if path.is_dir() else READ_FILE
            call(ADD_RULE, rules, 1, ctypes.byref(_Beneath(rights, opened)), 0)
            os.close(opened)
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _library_folders() -> set[str]:
    """Of Python, of what is installed for it, and of the packages imported, wherever they are: a checkout has links to them."""
    folders = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
    folders |= {site.getusersitepackages()} & {*sys.path}
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    return folders.union(*(vars(module).get("__path__", ()) for module in modules))


def _by_seccomp(_: Path) -> None:
    """Restrict the calls of the system by seccomp; OSError where its library is not."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(REFUSE)))
    for name in CALLS:
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:  # some are not of every processor
            library.seccomp_rule_add(rules, ctypes.c_uint32(ALLOW), number, 0)
    number = library.seccomp_syscall_resolve_name(b"fcntl")
    for command in FCNTL_COMMANDS:
        is_command = _Argument(1, EQUAL, command, 0)
        library.seccomp_rule_add_array(rules, ctypes.c_uint32(ALLOW), number, 1, ctypes.byref(is_command))
    if failed := library.seccomp_load(rules):
        raise OSError(-failed, os.strerror(-failed))
