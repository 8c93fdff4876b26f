"""OpenTelemetry traces: a span for each answered request, and below it one for each of its stages.

The spans are made of the times that a request notes anyway, after it has ended: a request is never slower by them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cacheblend.service.serving.served_request import Done, Failed, ServedRequest

SERVICE = "cacheblend"
FLUSH_MS = 2000  # at the end, for what is not sent yet


class Traces:
    """Makes traces of requests and hands them to a processor; a context manager.

    A request with a `traceparent` header is a part of its caller's trace. Of a text, a document or a salt nothing is told.

    Args:
        processor: sends the spans.
        model: the name that the service gives its model.
    """

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._model = model

    @classmethod
    def to_collector(cls, endpoint: str, model: str) -> Self:
        """Traces that go to a collector by OTLP over HTTP, in batches, from a thread; what it does not take is dropped."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)

    def observe(self, request: ServedRequest, how: Done | Failed | None) -> None:
        """Make the trace of a request that ended; `Scheduler` calls it."""
        prepared, now = request.prepared, time.perf_counter()
        to_unix_ns = time.time_ns() - int(now * 1e9)

        def at(seconds: float) -> int:
            return to_unix_ns + int(seconds * 1e9)

        above = TraceContextTextMapPropagator().extract({"traceparent": request.trace_parent})
        span = self._tracer.start_span(
            "answer",
            above,
            SpanKind.SERVER,
            {
                "gen_ai.request.model": self._model,
                "cacheblend.method": prepared.method,
                "cacheblend.tenant": request.tenant,
                "cacheblend.outcome": "cancelled" if how is None else "answered" if isinstance(how, Done) else "failed",
            },
            start_time=at(min(request.arrived, prepared.started)),
        )
        within = trace.set_span_in_context(span)

        def stage(name: str, start: float, end: float, attributes: Mapping[str, AttributeValue] | None = None) -> None:
            if end >= start > 0:
                child = self._tracer.start_span(name, within, attributes=attributes, start_time=at(start))
                child.end(at(end))

        stage("retrieve", prepared.started, prepared.retrieved, {"cacheblend.chunks": len(prepared.chunks)})
        if isinstance(how, Failed):
            span.set_status(Status(StatusCode.ERROR, type(how.error).__name__))
        elif isinstance(how, Done):
            plan, timings = how.answer.plan, how.answer.timings
            begun = request.submitted + how.queue_s
            stage("queue", request.submitted, begun)
            stage("lookup", begun, begun + timings.lookup_s, {"cacheblend.hits": plan.hits, "cacheblend.misses": plan.misses})
            blended = {
                "cacheblend.prompt_tokens": plan.prompt_tokens,
                "cacheblend.recomputed_tokens": float(plan.recomputed_tokens),
                "cacheblend.load_s": timings.load_s,
                "cacheblend.wait_s": timings.wait_s,
                **{f"cacheblend.loaded_bytes.{tier}": loaded for tier, loaded in plan.loaded_bytes.items()},
            }
            stage("prefill", begun + timings.lookup_s, prepared.prefilled, blended)
            stage("decode", prepared.first_token, prepared.ended, {"gen_ai.usage.output_tokens": len(how.answer.token_ids)})
            span.set_attribute("cacheblend.ttft_s", timings.ttft_s)
        span.end(at(now))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()
