"""CacheBlend for everyone: KV reuse for RAG.

    from cacheblend import Engine, EngineConfig

    with Engine(EngineConfig(model="smollm2-135m", store_dir="store")) as engine:
        engine.ingest([{"id": "1", "title": "Novex", "text": "Novex Systems was founded by Ada Brandt."}])
        print(engine.answer("Who founded Novex Systems?").text)

This is all that the package offers. The errors and `Progress` need nothing but Python; any other name is imported at its first
use, so that `import cacheblend` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .base.errors import CacheBlendError as CacheBlendError
from .base.errors import ConfigError as ConfigError
from .base.errors import InputError as InputError
from .base.errors import MissingExtraError as MissingExtraError
from .base.errors import PromptTooLongError as PromptTooLongError
from .base.errors import StoreFullError as StoreFullError
from .base.errors import UnsupportedModelError as UnsupportedModelError
from .base.threads import Progress as Progress

if TYPE_CHECKING:
    from importlib.metadata import version as _version

    from .blend import FusionConfig as FusionConfig
    from .blend import Fusor as Fusor
    from .blend import Segment as Segment
    from .loader import LoaderConfig as LoaderConfig
    from .retriever import Retriever as Retriever
    from .retriever import RetrieverConfig as RetrieverConfig
    from .service import Answer as Answer
    from .service import Engine as Engine
    from .service import EngineConfig as EngineConfig
    from .service import IngestReport as IngestReport
    from .store import ChunkKey as ChunkKey
    from .store import ChunkKV as ChunkKV
    from .store import KVStore as KVStore
    from .store import StoreConfig as StoreConfig

    __version__ = _version("cacheblend")

_MODULES = {
    "blend": ("FusionConfig", "Fusor", "Segment"),
    "loader": ("LoaderConfig",),
    "retriever": ("Retriever", "RetrieverConfig"),
    "service": ("Answer", "Engine", "EngineConfig", "IngestReport"),
    "store": ("ChunkKV", "ChunkKey", "KVStore", "StoreConfig"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *(name for name, value in vars().items() if isinstance(value, type)), *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("cacheblend")
    elif name in _MODULE_OF:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
