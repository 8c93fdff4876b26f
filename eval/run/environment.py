"""What a run ran on: code, libraries, machine, model."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cacheblend.blend import Fusor

LIBRARIES = ("cacheblend", "torch", "transformers")


def has_random_weights(fusor: Fusor) -> bool:
    """Whether the model's own configuration says that its weights were never trained."""
    return bool(getattr(fusor.model.config, "random_weights", False))


def environment(fusor: Fusor) -> dict[str, Any]:
    """Plain values for a run's `setup.json`."""
    device = fusor.decoder.device
    return {
        "fingerprint": fusor.fingerprint,
        "weights": "random" if has_random_weights(fusor) else "trained",
        "dtype": str(fusor.decoder.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" where tracked files differ from it; None where the code is no checkout."""
    source = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(source.parent), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return found.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # else it is a package inside somebody's checkout
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
