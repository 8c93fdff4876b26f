"""Store folders merged into one: the shards of an ingest on several machines become the store of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.retriever.merge import merge_indexes
from cacheblend.store.merge import MergeReport, check_stores, merge

from .config import INDEX_FOLDER, KV_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMergeReport:
    """What `merge_stores` did.

    Args:
        indexed: documents copied into the index; those it had already are not counted.
        kv: what was done to the KV.
    """

    indexed: int
    kv: MergeReport

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"indexed": self.indexed, **self.kv.as_dict()}


def merge_stores(
    sources: Sequence[Path], target: Path, on_progress: Callable[[str, int, int], None] | None = None
) -> StoreMergeReport:
    """Copy index and KV of store folders into one, as if their documents had been ingested into it in this order.

    Nothing is split, embedded or computed again. The index goes first: where the merge is cut off, a document that has no KV
    yet is found, and recomputed in the prompt. The same call goes on from there. Profiles belong to a machine: none is copied.

    Args:
        sources: the `--store-dir` folders to copy from.
        target: the folder to copy into; made when missing.
        on_progress: called with the stage ("index" or "copy"), documents or entries done, and how many in all.

    Raises:
        InputError, StoreDirectoryError, StoreFullError: see `cacheblend.store.merge.merge`.
        RetrieverError: the indexes were built with different settings; see `merge_indexes`.
    """
    report = on_progress or (lambda *_: None)
    kv = [source / KV_FOLDER for source in sources]
    check_stores(kv, target / KV_FOLDER)
    indexed = merge_indexes(
        [source / INDEX_FOLDER for source in sources],
        target / INDEX_FOLDER,
        on_progress=lambda done, total: report("index", done, total),
    )
    merged = merge(kv, target / KV_FOLDER, on_progress=lambda done, total: report("copy", done, total))
    return StoreMergeReport(indexed=indexed, kv=merged)
