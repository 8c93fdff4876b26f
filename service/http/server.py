"""What the API serves: one model, the tenants' engines, the scheduler, the counters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from cacheblend.retriever import Embedder

from ..chat_layout import ChatLayouts
from ..config import EngineConfig
from ..engine import Engine
from ..serving import Done, Failed, Observer, Scheduler, ServedRequest, ServingConfig
from .config import HttpConfig
from .metrics import Metrics
from .tenant_engines import engine_configs
from .tenants import ApiKeys, TenantConfig


class Server:
    """Owns all that answers requests; a context manager.

    Without tenants there is one engine, on the config's own folder. With tenants each has an engine on a folder of its own
    below it, with its part of the budgets, and all share the model and the embedder.

    Args:
        engine_config: model, folder, settings.
        serving: limits of the scheduler.
        http: limits of the API.
        tenants: who may use it; none for everybody who reaches it.
        engine: in place of the one that the config names; closed by its maker. Only without tenants.
        embedder: in place of the one that the config names.
        observer: told of every request that ends, and how, beside the metrics; see `Scheduler`.

    Raises:
        ConfigError: tenants that share a name or a key, or whose budgets are more than the service's.
        InputError, UnsupportedModelError, StoreDirectoryError, RetrieverError: see `Engine`.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        serving: ServingConfig | None = None,
        http: HttpConfig | None = None,
        tenants: Iterable[TenantConfig] = (),
        *,
        engine: Engine | None = None,
        embedder: Embedder | None = None,
        observer: Observer = lambda *_: None,
    ) -> None:
        tenants = tuple(tenants)
        self.http = http or HttpConfig()
        self.keys = ApiKeys(tenants)
        self.model_name = self.http.model_name or Path(engine_config.model).name or engine_config.model
        self.engines: dict[str, Engine] = {}
        with ExitStack() as opened:
            if not tenants:
                self.engines[""] = engine or opened.enter_context(Engine(engine_config, embedder=embedder))
            for name, config in engine_configs(engine_config, tenants).items():
                first = next(iter(self.engines.values()), None)
                self.engines[name] = opened.enter_context(
                    Engine(
                        config,
                        fusor=first.fusor if first else None,
                        embedder=first.retriever.embedder if first else embedder,
                    )
                )
            any_engine = next(iter(self.engines.values()))
            fusor = any_engine.fusor
            self.layouts = ChatLayouts(fusor.tokenizer, engine_config.instruction, fusor.max_positions)
            self.metrics = Metrics(self.model_name)

            def ended(request: ServedRequest, how: Done | Failed | None) -> None:
                self.metrics.observe(request, how)
                observer(request, how)

            self.scheduler = opened.enter_context(Scheduler(any_engine.fusor, serving, ended, self.metrics.guard.observe))
            self.metrics.watch(self.scheduler, self.engines.values())
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Finish what runs, close the engines that were opened here; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
