"""All errors that CacheBlend raises on purpose, in one tree below `CacheBlendError`.

A message names the value at fault and the remedy. The command line turns any of them into one line and exit code 1, or 2
for `ConfigError` and `InputError`; a traceback is printed only with `--debug`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SHOWN = 200  # characters of a value in a message


class CacheBlendError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(CacheBlendError, ValueError):
    """An option has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 3]}..."
        super().__init__(f"{field}={shown} is not allowed: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class InputError(CacheBlendError, ValueError):
    """A request, a document or a prompt cannot be used as it is."""


class PromptTooLongError(InputError):
    """A prompt has more tokens than the model has positions; `tokens` of them, where they were counted."""

    def __init__(self, message: str, tokens: int | None = None) -> None:
        super().__init__(message)
        self.tokens = tokens


class IncompatibleKVError(InputError):
    """A chunk's KV is of another model, prefix, dtype or text than the request needs."""


class MissingExtraError(CacheBlendError, ImportError):
    """An optional package is not installed; an extra of this one brings it."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; in the checkout run: pip install '.[{extra}]'", name=module)
        self.extra = extra


class UnsupportedModelError(CacheBlendError):
    """Blending is not verified on the model's architecture."""


class ModelFetchError(CacheBlendError):
    """A known model's package cannot be fetched, or is not the one that was published."""


class RetrieverError(CacheBlendError):
    """The retrieval index or the embedder cannot be used."""


class OtherIndexError(RetrieverError):
    """An index has documents for another model or embedder than the one that opens it, or has opened it."""


class DamagedDocumentError(RetrieverError):
    """A document's text, token ids or vectors in the index are not the ones that were written."""

    def __init__(self, document_id: str) -> None:
        super().__init__(f"document {document_id!r} is damaged in the index; ingest it again, or see `cacheblend store verify`")
        self.document_id = document_id


class ProfileError(CacheBlendError):
    """A device profile or a calibration is damaged, or of another model, device or version."""


class StoreError(CacheBlendError):
    """The KV store cannot be used."""


class StoreDirectoryError(StoreError):
    """A directory is not a store, cannot be written, or is of another format."""


class StoreFullError(StoreError):
    """The disk or the byte budget has no room for an entry."""


class BudgetTooSmallError(StoreFullError):
    """Documents do not fit the byte budget of the index, or their KV that of the store; the message has no path."""


class DamagedEntryError(StoreError):
    """A stored entry's bytes are not the ones that were written; the entry is now a miss."""


class RemoteError(StoreError):
    """The remote tier refuses, does not answer, or not in time; what it holds counts as missing meanwhile."""


class ServiceError(CacheBlendError):
    """The service cannot accept or finish a request now; it may later."""


class QueueFullError(ServiceError):
    """Too many requests wait; try again after `retry_after_s` seconds, which are rounded up and at least 1."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        super().__init__(f"{why}; try again in {self.retry_after_s} s")


class DeadlineError(ServiceError):
    """A request was not answered in its time."""


class ClientGoneError(ServiceError):
    """The client has gone: nobody waits for the answer any more."""


class ShuttingDownError(ServiceError):
    """The service is stopping and accepts no requests."""


class DocumentChangedError(CacheBlendError):
    """A document was deleted or replaced while it was ingested, so its KV was not stored."""

    def __init__(self, document_id: str) -> None:
        super().__init__(f"document {document_id!r} was deleted or replaced while it was ingested; look, and ingest it again")
        self.document_id = document_id


class FusionCancelledError(CacheBlendError):
    """The caller cancelled a fusion, or the loading that feeds it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Guard imports of packages that an extra brings.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "cacheblend":
            raise
        raise MissingExtraError(error.name, extra) from error
