"""CacheBlend for everyone: KV reuse for RAG.

    from cacheblend import Engine, EngineConfig

    with Engine(EngineConfig(model="smollm2-135m", store_dir="my-store")) as engine:
        engine.ingest([{"id": "1", "title": "Novex", "text": "Novex Systems was founded by Ada Brandt."}])
        print(engine.answer("Who founded Novex Systems?").text)

This is all that the package offers. A name is imported at its first use, so that `import cacheblend` costs nothing; the errors
and `Progress` need nothing but Python.
"""

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names, names_of

if TYPE_CHECKING:
    from .base.errors import CacheBlendError as CacheBlendError
    from .base.errors import ConfigError as ConfigError
    from .base.errors import InputError as InputError
    from .base.errors import MissingExtraError as MissingExtraError
    from .base.errors import PromptTooLongError as PromptTooLongError
    from .base.errors import StoreFullError as StoreFullError
    from .base.errors import UnsupportedModelError as UnsupportedModelError
    from .base.threads import Progress as Progress
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

    __version__: str

__all__ = ["__version__", *names_of(__file__)]
_offered = lazy_names(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cacheblend")
    return _offered(name)


def __dir__() -> list[str]:
    return sorted(__all__)
