"""What is asked: a method of our own service, or another OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.eval.data import RequestSource, Wording

from .request_set import LoadRequest

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
        run: tells this run's cache salts from another's.
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
