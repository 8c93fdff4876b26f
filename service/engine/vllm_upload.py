"""Documents for a running vLLM: posted one by one to the route of its CacheBlendConnector, which stores their chunks' KV."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from cacheblend.base.errors import ConfigError, InputError, ServiceError
from cacheblend.base.options import option
from cacheblend.retriever import Document

from .ingest import StreamProgress

ROUTE = "/v1/cacheblend/documents"
TIMEOUT_S = 3600.0  # of a document: its answer comes when the KV of all its chunks is computed, between others' requests
REFUSED_DOCUMENT = (400, 413, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """A running vLLM that documents are given to.

    Raises:
        ConfigError: no HTTP address.
    """

    vllm: str | None = option(
        None, "Give the documents to a running vLLM with CacheBlendConnector, http://host:8000; it stores their chunks' KV."
    )
    vllm_api_key: str | None = option(None, "Key of that vLLM (its --api-key).", secret=True)

    def __post_init__(self) -> None:
        if self.vllm is None:
            return
        try:
            parts = urlsplit(self.vllm)
        except ValueError:  # brackets without an address in them, say
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError("vllm", self.vllm, "an address such as http://localhost:8000")

    @property
    def route(self) -> str:
        """Where documents are posted to; the address may end with /v1, as OpenAI's clients take it."""
        return (self.vllm or "").rstrip("/").removesuffix("/v1") + ROUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """Counts of an upload.

    Args:
        documents: documents that were taken.
        chunks: their chunks.
        computed: chunks whose KV was computed now.
        already_stored: chunks whose KV was stored before.
        seconds: wall clock of it all.
    """

    documents: int
    chunks: int
    computed: int
    already_stored: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def upload_documents(
    documents: Iterable[Document], config: VllmConfig, faults: dict[str, str], on_progress: StreamProgress
) -> UploadReport:
    """Have a running vLLM store the KV of documents' chunks; what it has stored before is not computed again.

    Args:
        documents: taken one at a time.
        config: the vLLM.
        faults: takes the documents that it refuses, and why.
        on_progress: called with the documents done so far, and the tokens of those of which KV was computed.

    Raises:
        ServiceError: it does not answer, or has no such route; what was done is kept, and the same call goes on from there.
        InputError: it refuses the key.
    """
    started, taken, chunks, computed, tokens = time.monotonic(), 0, 0, 0, 0
    for done, document in enumerate(documents, 1):
        answer, why = _post(config, {"documents": [{"title": document.title, "text": document.text}]})
        if why:
            faults[document.id] = f"{document.id}: {why}"
        else:
            taken, chunks, computed = taken + 1, chunks + int(answer["chunks"]), computed + int(answer["stored_chunks"])
            tokens += int(answer["tokens"]) if answer["stored_chunks"] else 0
        on_progress(done, tokens)
    seconds = time.monotonic() - started
    return UploadReport(documents=taken, chunks=chunks, computed=computed, already_stored=chunks - computed, seconds=seconds)


def _post(config: VllmConfig, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer, and why the document is refused; empty where it is not."""
    headers = {"Content-Type": "application/json"}
    if config.vllm_api_key:
        headers["Authorization"] = f"Bearer {config.vllm_api_key}"
    request = urllib.request.Request(config.route, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
        if not {"chunks", "stored_chunks", "tokens"} <= found.keys():
            raise ServiceError(f"{config.route} is not the route of CacheBlendConnector; it answers {str(found)[:200]}")
        return found, ""
    except urllib.error.HTTPError as error:
        why = _message(error)
        if error.code in REFUSED_DOCUMENT:
            return {}, why
        if error.code in (401, 403):
            raise InputError(f"{config.vllm} refuses the key ({error.code}); give --vllm-api-key") from error
        if error.code in (404, 405):
            raise ServiceError(
                f"{config.vllm} has no {ROUTE}: start vLLM with CacheBlendConnector and VLLM_PLUGINS=cacheblend"
            ) from error
        raise ServiceError(f"{config.vllm} answers {error.code}: {why}") from error
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
        why = str(getattr(error, "reason", "") or error or type(error).__name__)
        raise ServiceError(f"{config.vllm} does not answer ({why}); is it running?") from error


def _message(error: urllib.error.HTTPError) -> str:
    """What an error's body says, as OpenAI's errors do."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return str(error.reason)
