"""The service of the API: one model, the tenants' engines, the scheduler, the counters, and calls to their threads."""

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from fastapi import Request

from cacheblend.base.errors import ClientGoneError, ServiceError
from cacheblend.base.threads import Check
from cacheblend.retriever import Embedder
from cacheblend.service.engine.config import KV_FOLDER, EngineConfig
from cacheblend.service.engine.decoding import token_bytes
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.grammar import GrammarCompiler
from cacheblend.service.serving.calls import Call, CallPool
from cacheblend.service.serving.config import ServingConfig
from cacheblend.service.serving.scheduler import Scheduler

from .config import HttpConfig, TenantConfig, engine_configs
from .guard import BODIES_OF_TENANT, ApiError, ApiKeys, refused, shortened
from .ingests import Ingests
from .metrics import Metrics

logger = logging.getLogger(__name__)
WARM_UP_TOKENS = 32
MAX_DOCUMENT_CALLS = 32  # of a tenant, waiting and running; and as many embeddings
STALL_S = 60.0
BACKGROUND_SHARE = 0.25  # of the time, for uploads and embeddings while requests run or wait
LOOK_FOR_CLIENT_S = 0.5  # how often a request that waits is checked for its client
UPLOADS_FOLDER = "uploads"
_Result = TypeVar("_Result")


class Server:
    """Owns all that answers requests; a context manager.

    Work beside the model has threads by its kind, so that none waits for another: `preparing` (layout, retrieval), `uploads`,
    `document_calls` (lists, deletions), `embeddings`. Each tenant has an engine in a folder below the config's, with its part
    of the budgets; all share the model and the embedder. Without tenants there is one engine, on the config's own folder.

    Args:
        tenants: who may use it; none for everybody who reaches it.
        engine: in place of the one that the config names; closed by its maker. Only without tenants.
        stall_s: seconds without a step of what runs after which the service is not ready.

    Attributes:
        template_kwargs: variables of the chat template that chats have by default.
        ingests: the uploads as jobs.

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
        stall_s: float = STALL_S,
    ) -> None:
        tenants = tuple(tenants)
        self.http, self._stall_s = http or HttpConfig(), stall_s
        self.keys = ApiKeys(tenants, self.http.api_key)
        self.model_name = self.http.served_model_name or Path(engine_config.model).name or engine_config.model
        self.started = int(time.time())
        self.metrics = Metrics(self.model_name)
        self.ingests = Ingests(BODIES_OF_TENANT * self.http.max_body_bytes)
        self.reading = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by tenant: large bodies, one at a time
        with ExitStack() as opened:
            self.engines = _open_engines(opened, engine_config, tenants, engine, embedder)
            first = next(iter(self.engines.values()))
            self.template_kwargs, fusor = self.http.template_kwargs(), first.fusor
            first.prompts.template.check_kwargs(self.template_kwargs, "default_chat_template_kwargs")
            self.uploads_folder = Path(engine_config.store_dir, UPLOADS_FOLDER)
            self.uploads_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.callback(os.close, folder := os.open(self.uploads_folder, os.O_RDONLY))
            with suppress(BlockingIOError):  # another service uses the folder
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in self.uploads_folder.iterdir():  # by a service that was killed
                    shutil.rmtree(left, ignore_errors=True)
            fcntl.flock(folder, fcntl.LOCK_SH)
            metrics, several = self.metrics, len(tenants) > 1
            self.scheduler = scheduler = opened.enter_context(
                Scheduler(fusor, serving, metrics.observe, metrics.observe_shadow, several_tenants=several)
            )
            self.grammars = GrammarCompiler(fusor.model, fusor.tokenizer)
            self.token_bytes = lru_cache(None)(partial(token_bytes, fusor.tokenizer))  # at most one of each word
            limits = scheduler.config
            self.preparing = preparing = CallPool("preparing requests", limits.max_waiting, at_once=4)
            background = partial(CallPool, pauses_while=lambda: scheduler.is_busy or preparing.is_busy, share=BACKGROUND_SHARE)
            self.uploads = background("uploads", limits.max_uploads)
            self.document_calls = CallPool("calls about documents", MAX_DOCUMENT_CALLS, per_tenant=2)
            self.embeddings = background("embeddings", MAX_DOCUMENT_CALLS, per_tenant=MAX_DOCUMENT_CALLS)
            self._pools = (self.preparing, self.uploads, self.document_calls, self.embeddings)
            for pool in self._pools:
                opened.callback(pool.close, after_s=limits.grace_s / 2 if pool is self.uploads else 0.0)
            metrics.watch(scheduler, self.engines.values())
            self._opened = opened.pop_all()

    def check_model(self, name: str | None, *others: str) -> None:
        """Refuse, with a 404, a model that is not the one there is, nor one of `others`."""
        if name is not None and {name, name.rpartition("/")[2]}.isdisjoint((self.model_name, *others)):
            message = f"there is no model {shortened(name)} here; use {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_count(self, documents: Sequence[object] | None) -> None:
        """Refuse more than `max_documents`."""
        if documents is not None and len(documents) > self.http.max_documents:
            why = f"{len(documents)} are more than max_documents={self.http.max_documents}; send fewer at once"
            raise refused("documents", why, code="too_many_documents")

    @property
    def not_ready(self) -> str:
        """Why requests are not served, or do not get on; empty where they are."""
        if not self.scheduler.is_alive:
            return "the service is stopping, or its scheduler has ended"
        stalled_s = max(self.scheduler.stalled_s, *(pool.stalled_s for pool in self._pools))
        if stalled_s > self._stall_s:
            return f"the service does not get on: nothing has been done for {stalled_s:.0f} s of what waits"
        if not all(Path(engine.config.store_dir, KV_FOLDER).is_dir() for engine in self.engines.values()):
            return "the folder of a store is gone; bring it back, or start the service anew"
        return ""

    def warm_up(self) -> None:
        """Run embedder and model once, so that the first request does not wait for what is made at the first use."""
        engine = next(iter(self.engines.values()))
        engine.retriever.embedder.encode(["warm up"])
        engine.fusor.prefill([0] * WARM_UP_TOKENS)

    def stop(self) -> None:
        """Take nothing new, and refuse uploads and calls that have not begun; what runs goes on. Returns at once."""
        self.scheduler.stop()
        for pool in self._pools:
            pool.stop()
        for engine in self.engines.values():
            engine.background.stop()

    def give_up(self) -> None:
        """Give up all that runs; its clients get that answer now, and the work ends at its next step. Returns at once."""
        self.scheduler.abort()
        for pool in self._pools:
            pool.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish what runs, and close the engines that were opened here."""
        try:
            self._opened.__exit__(kind, error, trace)
        except Exception:
            if error is None:
                raise
            # The block's own error is the one to see.
            logger.exception("the service could not be closed as it should; what was acknowledged is on disk")


def _open_engines(
    opened: ExitStack, config: EngineConfig, tenants: Sequence[TenantConfig], engine: Engine | None, embedder: Embedder | None
) -> dict[str, Engine]:
    """The engine of each tenant by name, "" where there are none; all share the model and the embedder of the first."""
    if not tenants:
        return {"": engine or opened.enter_context(Engine(config, embedder=embedder))}
    engines: dict[str, Engine] = {}
    shared: dict[str, Any] = {"embedder": embedder}
    for name, own in engine_configs(config, tenants).items():
        engines[name] = one = opened.enter_context(Engine(own, **shared))
        shared = {"fusor": one.fusor, "embedder": one.retriever.embedder, "foreground": one.foreground}
    return engines


async def run_call(pool: CallPool, request: Request, work: Callable[[Check], _Result]) -> _Result:
    """Have work done for a request; see `wait_for_call`."""
    return await wait_for_call(pool, request, Call(work, tenant=request.state.tenant))


async def wait_for_call(pool: CallPool, request: Request, call: Call[_Result]) -> _Result:
    """Have a request's call done in its tenant's turn, and wait for it as long as the client does.

    Raises:
        QueueFullError, ShuttingDownError: the pool does not accept it.
        DeadlineError: the request is older than `deadline_s`; with the call's `until_begun` only if the work has not begun.
        ClientGoneError: the client has left; the work ends at its next check.
    """
    server: Server = request.app.state.server
    call.deadline_s, call.arrived = server.scheduler.config.deadline_s, request.state.arrived
    pool.submit(call)
    try:
        return await while_client_waits(request, asyncio.wrap_future(call.future), call.check)
    except BaseException as error:  # the server cancels what waits when it is closed
        pool.leave(call, error if isinstance(error, ServiceError) else ClientGoneError("the client has left"))
        raise


async def while_client_waits(request: Request, work: Awaitable[_Result], check: Check = lambda: None) -> _Result:
    """Wait for work as long as a request's client does, and as long as `check` does not raise.

    Raises:
        ClientGoneError: the client has left.
    """
    waiting = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_FOR_CLIENT_S))[0]:
            if await request.is_disconnected():
                raise ClientGoneError("the client has left")
            check()
        return waiting.result()
    finally:
        waiting.cancel()


async def run_document_call(request: Request, call: Callable[[Engine], _Result]) -> _Result:
    """Have a call about documents done on the tenant's engine; raises as `run_call`."""
    return await run_call(request.app.state.server.document_calls, request, lambda _: call(request.state.engine))
