"""Targets of a load: a method of our own service, or another OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from cacheblend.base.errors import ConfigError, InputError, ServiceError
from cacheblend.eval.data import Example, Request, RequestSource, Wording
from cacheblend.retriever import Embedder


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A question over documents.

    Args:
        example: with the right answers.
        question: in the data set's words.
        documents: texts, in the prompt's order; chunks of one document are one text, since what is in front of a chunk in its
            document says which of its tokens must be recomputed.
        chunk_tokens: of the longest chunk.
        is_warm_up: the source sets it apart to fill caches.
    """

    example: Example
    question: str
    documents: tuple[str, ...]
    chunk_tokens: int
    is_warm_up: bool = False


def load_requests(
    source: RequestSource,
    tokenizer: Any,
    limit: int | None,
    embedder: Embedder | None = None,
    on_corpus: Callable[[int, int], None] | None = None,
) -> Iterator[LoadRequest]:
    """The requests of a source, made as they are asked for.

    Args:
        source: the data set.
        tokenizer: measures chunks and prompts; a peer's own may count a little differently.
        limit: longest prompt in tokens; None for no limit.
        embedder: in place of the retriever's own.
        on_corpus: see `RequestSource.requests`.
    """
    for request in source.requests(tokenizer, limit, embedder, on_corpus):
        yield _texts(request, source, tokenizer)


def split_requests(
    requests: Iterable[LoadRequest], warm_up: int, rates: int, each: int
) -> tuple[list[LoadRequest], list[list[LoadRequest]]]:
    """Requests to warm up with, and those of every rate; no more are taken than that.

    Raises:
        InputError: there are too few.
    """
    coming = iter(requests)
    apart: list[LoadRequest] = []
    measured: list[LoadRequest] = []
    for request in coming:
        (apart if request.is_warm_up else measured).append(request)
        if measured:
            break
    needed = rates * each if apart else warm_up + rates * each
    measured += itertools.islice(coming, needed - len(measured))
    if not apart:
        apart, measured = measured[:warm_up], measured[warm_up:]
    if len(measured) < rates * each:
        raise InputError(
            f"the data set has {len(measured)} requests after the {len(apart)} that warm up, and {rates} rates of {each} need "
            f"{rates * each}; lower --requests or give fewer rates"
        )
    return apart, [measured[rate * each : (rate + 1) * each] for rate in range(rates)]


def _texts(request: Request, source: RequestSource, tokenizer: Any) -> LoadRequest:
    prompt, documents = request.prompt, dict[str, str]()
    for index, chunk in enumerate(prompt.chunks):
        document = prompt.document_ids[index] if prompt.document_ids else str(index)
        documents[document] = documents.get(document, "") + tokenizer.decode(chunk, clean_up_tokenization_spaces=False)
    return LoadRequest(
        request.example,
        source.wording.question.format(question=request.example.question),
        tuple(filter(None, map(str.strip, documents.values()))),
        max(map(len, prompt.chunks), default=1),
        request.is_warm_up,
    )


BETWEEN_DOCUMENTS = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One column of the table.

    Args:
        label: its name there.
        address: up to `/v1`, which is not part of it.
        model: as the server calls it.
        wording: the words around a question.
        method: of our own service; None for another server, which gets the documents as part of the text.
        recompute_ratio: of our own service, where the method takes one; None leaves it to the service.
        cache_salt: of our own service: what this target's requests find cached is what its own left.
        completions: a text is continued by `/v1/completions`, for models without a chat template; else `/v1/chat/completions`.
        api_key: sent as bearer token; never written to a run's folder.
    """

    label: str
    address: str
    model: str
    wording: Wording
    method: str | None = None
    recompute_ratio: float | None = None
    cache_salt: str = ""
    completions: bool = False
    api_key: str | None = None

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{self.address}/v1/{'completions' if self.completions else 'chat/completions'}"

    @property
    def headers(self) -> dict[str, str]:
        """The key, where there is one."""
        return _headers(self.api_key)

    def body(self, request: LoadRequest, max_tokens: int) -> dict[str, Any]:
        """A streaming, greedy request."""
        common = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.method is not None:
            ratio = {} if self.recompute_ratio is None else {"recompute_ratio": self.recompute_ratio}
            return {
                **common,
                **ratio,
                "messages": [{"role": "user", "content": request.question}],
                "documents": [{"text": document} for document in request.documents],
                "method": self.method,
                "cache_salt": self.cache_salt,
            }
        text = "".join(f"{document}{BETWEEN_DOCUMENTS}" for document in request.documents)
        text = f"{self.wording.instruction}{text}{self.wording.before_question}{request.question}"
        if self.completions:
            return {**common, "prompt": f"{text}{self.wording.after_question}"}
        return {**common, "messages": [{"role": "user", "content": text}]}


def own_targets(
    address: str,
    methods: Iterable[str],
    source: RequestSource,
    *,
    run: str,
    recompute_ratio: float | None = None,
    api_key: str | None = None,
) -> list[Target]:
    """A target for each method of our own service.

    Args:
        address: of the service.
        methods: the service's names.
        source: where not all of its chunks are cached before a request comes, each method starts with nothing cached.
        run: makes this run's cache salts unlike another's.
        recompute_ratio: of `blend`; None leaves it to the service.
        api_key: where it has tenants.

    Raises:
        ConfigError: a method that the service does not know.
        InputError: no service answers there.
    """
    model = first_model(address, api_key)
    known = model.get("methods")
    if known is None:
        raise InputError(
            f"{address} is no CacheBlend service (its /v1/models names no methods); give it as --peer NAME={address}"
        )
    for method in methods:
        if method not in known:
            raise ConfigError("methods", method, f"of {', '.join(known)}")
    return [
        Target(
            label=method,
            address=address,
            model=str(model["id"]),
            wording=source.wording,
            method=method,
            recompute_ratio=recompute_ratio if method == "blend" else None,
            cache_salt="" if source.caches_all else f"load-{run}-{method}",
            api_key=api_key,
        )
        for method in methods
    ]


def peer_target(label: str, address: str, wording: Wording, *, completions: bool = False, api_key: str | None = None) -> Target:
    """Another server's target, by the first model that it names.

    Raises:
        InputError: no server answers there.
    """
    model = str(first_model(address, api_key)["id"])
    return Target(label=label, address=address, model=model, wording=wording, completions=completions, api_key=api_key)


def first_model(address: str, api_key: str | None) -> dict[str, Any]:
    """The first model of a server's `/v1/models`.

    Raises:
        InputError: no OpenAI-compatible server answers there.
    """
    try:
        response = httpx.get(f"{address}/v1/models", headers=_headers(api_key), timeout=30)
        response.raise_for_status()
        model: dict[str, Any] = response.json()["data"][0]
        model["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{address}/v1/models gives no model ({error}); give an OpenAI-compatible server's address") from error
    return model


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


LOOK_EVERY_S = 0.2


async def settled_evictions(client: httpx.AsyncClient, target: Target) -> int | None:
    """Wait until nothing is computed or written after the requests any more, and give the entries that were evicted from NVMe.

    What one step leaves to be done would otherwise be done beside the next target's.

    Returns:
        Evictions since the service started; None for another server, which does not tell.

    Raises:
        ServiceError: it does not answer.
    """
    if target.method is None:
        return None
    while True:
        store = await _store(client, target)
        if not (store["precomputes_waiting"] or store["pending_writes"]):
            return int(store["nvme"]["evictions"])
        await asyncio.sleep(LOOK_EVERY_S)


async def _store(client: httpx.AsyncClient, target: Target) -> dict[str, Any]:
    url = f"{target.address}/v1/store"
    try:
        response = await client.get(url, headers=target.headers)
        response.raise_for_status()
        store: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServiceError(f"{url} does not answer: {error}") from error
    return store
