"""Documents for a running vLLM: posted one by one to the route of its CacheBlendConnector, which stores their chunks' KV."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from cacheblend.base.errors import ConfigError, InputError, ServiceError
from cacheblend.base.options import option
from cacheblend.base.threads import Progress
from cacheblend.retriever import Document

from .ingest import IngestReport

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
            parts = httpx.URL(self.vllm)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError("vllm", self.vllm, "an address such as http://localhost:8000")

    @property
    def route(self) -> str:
        """Where documents are posted to; the address may end with /v1, as OpenAI's clients take it."""
        return (self.vllm or "").rstrip("/").removesuffix("/v1") + ROUTE


def upload_documents(
    documents: Iterable[Document], config: VllmConfig, faults: dict[str, str], progress: Progress
) -> IngestReport:
    """Have a running vLLM store the KV of documents' chunks; what it has stored before is not computed again.

    Args:
        documents: taken one at a time.
        config: the vLLM.
        faults: collects the documents that it refuses, and why.
        progress: follows the upload; `tokens` are those of documents of which KV was computed.

    Raises:
        ServiceError: it does not answer, or has no such route; the same call goes on where it was.
        InputError: it refuses the key.
    """
    started, report = time.monotonic(), IngestReport()
    headers = {"Authorization": f"Bearer {config.vllm_api_key}"} if config.vllm_api_key else {}
    with httpx.Client(headers=headers, timeout=TIMEOUT_S) as client:  # without redirects: the key is for this host
        for done, document in enumerate(documents, 1):
            answer, why = _post(client, config, document)
            if why:
                faults[document.id] = f"{document.id}: {why}"
            else:
                chunks, computed = int(answer["chunks"]), int(answer["stored_chunks"])
                tokens = int(answer["tokens"]) if computed else 0
                report += IngestReport(
                    documents=1, chunks=chunks, computed=computed, already_stored=chunks - computed, tokens=tokens
                )
            progress.documents, progress.tokens = done, report.tokens
            progress.note_batch()
    return replace(report, seconds=time.monotonic() - started)


def _post(client: httpx.Client, config: VllmConfig, document: Document) -> tuple[dict[str, Any], str]:
    """The answer, and why the document is refused; empty where it is not."""
    try:
        answer = client.post(config.route, json={"documents": [{"title": document.title, "text": document.text}]})
        found = answer.json() if answer.is_success or answer.status_code in REFUSED_DOCUMENT else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ServiceError(f"{config.vllm} does not answer ({why}); is it running?") from error
    status = answer.status_code
    if answer.is_success and isinstance(found, dict) and {"chunks", "stored_chunks", "tokens"} <= found.keys():
        return found, ""
    if answer.is_success:
        raise ServiceError(f"{config.route} is not the route of CacheBlendConnector; it answers {str(found)[:200]}")
    if status in REFUSED_DOCUMENT:
        refusal = found.get("error") if isinstance(found, dict) else None
        return {}, str(refusal.get("message") if isinstance(refusal, dict) else answer.reason_phrase)
    if status in (401, 403):
        raise InputError(f"{config.vllm} refuses the key ({status}); give --vllm-api-key")
    if status in (404, 405):
        raise ServiceError(f"{config.vllm} has no {ROUTE}: start vLLM with CacheBlendConnector and VLLM_PLUGINS=cacheblend")
    raise ServiceError(f"{config.vllm} answers {status}: {answer.text[:200] or answer.reason_phrase}")
