"""What tells one model from another in the store's keys: SHA-256 over config, weights and compute dtype."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cacheblend.base.user_cache import user_cache_folder

logger = logging.getLogger(__name__)
_WEIGHTS = ("*.safetensors", "*.bin")


def fingerprint_directory(directory: Path, model: nn.Module, dtype: torch.dtype) -> str:
    """Fingerprint of a model loaded from a directory: its config as it was loaded, its weight shards, and `dtype`.

    See `file_digest` for how a shard is hashed.
    """
    digest = _config_digest(model, dtype)
    for shard in sorted(path for pattern in _WEIGHTS for path in directory.glob(pattern)):
        digest.update(f"{shard.name}:{file_digest(shard)}\n".encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex.

    It is remembered by real path, size and modification time in the user's cache folder, so that a large file is hashed once.
    """
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    known = _read_known()
    if identity not in known:
        with path.open("rb") as file:
            known[identity] = hashlib.file_digest(file, "sha256").hexdigest()
        _write_known(known)
    return known[identity]


def fingerprint_module(model: nn.Module, dtype: torch.dtype) -> str:
    """Fingerprint of a model in memory, over its config, the bytes of its parameters and buffers, and `dtype`."""
    digest = _config_digest(model, dtype)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _config_digest(model: nn.Module, dtype: torch.dtype) -> hashlib._Hash:
    config: Any = model.config
    volatile = {"_name_or_path", "transformers_version", "dtype"}
    kept = {name: value for name, value in config.to_dict().items() if name not in volatile}
    return hashlib.sha256(f"{dtype}\n{json.dumps(kept, sort_keys=True, default=str)}\n".encode())


def _known_file() -> Path:
    return user_cache_folder() / "fingerprints.json"


def _read_known() -> dict[str, str]:
    try:
        known = json.loads(_known_file().read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}


def _write_known(known: dict[str, str]) -> None:
    target = _known_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known))
        temporary.replace(target)
    except OSError as error:
        logger.info("weight digests are not remembered in %s: %s", target, error)
