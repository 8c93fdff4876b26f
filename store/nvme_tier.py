"""NVMe: entries as files with a row each in the catalog, changed together, up to a byte budget."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeVar

from cacheblend.base.errors import DamagedEntryError, StoreError, StoreFullError

from .catalog import Catalog, CatalogEntry
from .chunk import PASSAGES
from .entry import EncodedEntry, EntryInfo, pack_header
from .entry_file import EntryFile, NewFile, write_files
from .layout import Journal, Reserve, StoreFolder, WriteLock
from .tiers import NVME, Pins, read_entry
from .write_queue import PendingWrite

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
PASSAGES_PART = 8  # of the budget, one over this is for the passages of each namespace


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Findings of `KVStore.verify`; entries by the hex of their keys."""

    entries: int  # in the catalog
    bytes: int  # of their files
    unowned: int  # of no document: texts that requests brought, or an ingest that was killed; the next one finds its own
    damaged: tuple[str, ...]  # the file is not what was written; repaired by setting it aside
    missing: tuple[str, ...]  # without a file; repaired by dropping the entry
    mismatched: tuple[str, ...]  # the catalog says something else than the file; repaired by what the file says
    orphans: tuple[str, ...]  # files without an entry; complete ones are entered into the catalog, others set aside
    leftovers: int  # files that a crash left half written; removed
    miscounted: bool  # the catalog's totals do not follow from its entries; repaired by counting anew
    repaired: bool  # all of it

    @property
    def ok(self) -> bool:
        return not (self.damaged or self.missing or self.mismatched or self.orphans or self.leftovers or self.miscounted)


class NvmeTier:
    """The durable `KVTier`: files and rows of entries. Thread-safe, and safe among processes.

    A file is synced and renamed before its row is written; a row is removed before its file. So an entry exists exactly while
    its row does, and every row has a complete file. A file without a row is removed at the end of its change or, if the process
    died, before the next change by any process (`Journal`).
    """

    name: ClassVar[str] = NVME
    in_memory: ClassVar[bool] = False

    def __init__(self, folder: StoreFolder, budget_bytes: int, pins: Pins) -> None:
        self.folder, self.budget_bytes, self._pins = folder, budget_bytes, pins
        self.evictions, self.damaged = 0, 0
        with ExitStack() as opened:
            self._lock = opened.enter_context(closing(WriteLock(folder.lock)))
            self._journal = opened.enter_context(closing(Journal(folder.journal)))
            self.reserve = Reserve(folder.reserve)
            with self._lock:
                catalog = self.on_full_disk_too(lambda: Catalog(folder.catalog, self._entries_of_files))
            self.catalog = opened.enter_context(closing(catalog))
            with self.exclusive():
                self.leftovers(remove=True)
                if self.size()[1] > budget_bytes:
                    self._correct_sizes()
                if gone := self.shrink():
                    logger.warning("the KV of %d chunks exceeded nvme_budget_bytes=%d, and is gone", len(gone), budget_bytes)
                self.reserve.refill()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other threads and processes, and finish the change of a killed process first; re-entrant."""
        with self._lock:
            if self._lock.depth == 1 and (unfinished := self._journal.unfinished()):
                logger.warning("a process died while it changed %d entries of %s", len(unfinished), self.folder.root)
                self._finish(unfinished)
            yield

    @contextmanager
    def changing(self, digests: Sequence[str]) -> Iterator[None]:
        """A change of rows and files of these entries; the files of those without a row at its end are removed."""
        self._journal.begin(digests)
        try:
            yield
        finally:
            self._end_change(digests)

    def on_full_disk_too(self, change: Callable[[], _Result], digests: Iterable[str] = ()) -> _Result:
        """Make a change that frees room or needs hardly any: on a full disk first the reserve goes, then files that go anyway.

        Args:
            change: what to do in the catalog; made once, or not at all.
            digests: the entries whose rows it removes.

        Raises:
            StoreFullError: there is no room all the same.
        """
        try:
            return change()
        except StoreFullError:
            if not self.reserve.release() and not digests:
                raise
        try:
            return change()
        except StoreFullError:
            for digest in digests:
                self.folder.entry_path(digest).unlink(missing_ok=True)
            return change()

    def __contains__(self, digest: str) -> bool:
        return not self._pins.is_evicting(digest) and digest in self.catalog

    def size(self) -> tuple[int, int]:
        return self.catalog.totals()

    def open(self, digest: str, *, is_use: bool = True) -> EntryFile | None:
        """Open an entry; a damaged file is set aside and is a miss."""
        if digest not in self:
            return None
        try:
            file = EntryFile.open(self.folder.entry_path(digest), digest)
        except DamagedEntryError:
            self.set_aside(digest)
            return None
        except OSError as error:  # too many open files, say: nothing is wrong with the entry
            logger.warning("entry %s cannot be opened and counts as a miss: %s", digest, error)
            return None
        if is_use:
            self.catalog.touch(digest)
        return file

    def load(self, digest: str) -> EncodedEntry | None:
        """Read an entry, which is not a use; None for a miss. A damaged file is set aside and is a miss."""
        return None if (file := self.open(digest, is_use=False)) is None else read_entry(file, self)

    def write(self, writes: Sequence[PendingWrite]) -> Sequence[str]:
        """Store entries, all of them, durable on return; returns the digests of the evicted ones.

        A chunk of a document that the store does not know any more, or not in that version, is left out, unless another
        document has it. Of the others those without a namespace are noted as their documents'. Raises as `KVStore.put` does.
        """
        with self.exclusive():
            documents = {write.document for write in writes if write.document is not None}
            known = {document for document in documents if self.catalog.document_version(document[0]) == document[1]}
            new: dict[str, NewFile] = {}
            chunks: list[tuple[str, str]] = []
            for write in writes:
                digest, may_belong = write.digest, not write.entry.info.key.namespace
                if write.document in known:
                    if may_belong:
                        chunks.append((write.document[0], digest))
                elif write.document is not None and not (may_belong and self.catalog.has_document(digest)):
                    continue
                if digest in self.catalog:
                    self.catalog.touch(digest)
                else:
                    header = pack_header(write.entry.info, write.entry.checksums)
                    new[digest] = NewFile(header, write.entry, self.folder.writing / digest, self.folder.entry_path(digest))
            if not new:
                return ()
            of_passages: Counter[str] = Counter()
            for file in new.values():
                if (namespace := file.entry.info.key.namespace).startswith(PASSAGES):
                    of_passages[namespace] += file.nbytes
            size = sum(file.nbytes for file in new.values())
            with self._evicting(size, of_passages) as victims, self.changing([*new, *victims]):
                self.folder.make_entry_folders(file.final for file in new.values())
                write_files(list(new.values()))
                rows = [_row(file.entry.info, file.nbytes, self.catalog.now_ns()) for file in new.values()]
                self.catalog.change(add=rows, remove=victims, chunks=chunks)
            return victims

    def remove(self, digests: Iterable[str]) -> int:
        """Remove entries, pinned or not (a reader still has the file open); returns their number."""
        with self.exclusive():
            known = [digest for digest in digests if digest in self.catalog]
            if known:
                with self.changing(known):
                    self.on_full_disk_too(lambda: self.catalog.change(remove=known), known)
            return len(known)

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        """Move an entry's file away and drop the entry, unless its header and these layers are intact.

        They do where another thread or process has set the entry aside, or evicted it, and written it again since.
        """
        with self.exclusive():
            if digest not in self.catalog:
                return
            path = self.folder.entry_path(digest)
            try:
                with EntryFile.open(path, digest) as file:
                    for layer in layers:
                        file.read_layer(layer)
                return
            except DamagedEntryError as damage:
                self._drop_damaged(digest, damage)

    def adopt(self, path: Path) -> None:
        """Enter a complete file into the catalog, in place of an older row; set it aside if it is damaged."""
        with self.exclusive():
            try:
                with EntryFile.open(path, path.name) as file:
                    file.load()
                    self.catalog.change(add=[self._row_of(file, path)])
            except DamagedEntryError as damage:
                if path.name in self.catalog:
                    self._drop_damaged(path.name, damage)
                else:
                    self.folder.set_aside(path, damage)

    def shrink(self) -> Sequence[str]:
        """Evict entries until the budget holds, as far as pins allow; returns their digests."""
        with self.exclusive(), self._evicting(0) as victims:
            if victims:
                with self.changing(victims):
                    self.on_full_disk_too(lambda: self.catalog.change(remove=victims), victims)
            return victims

    def leftovers(self, *, remove: bool) -> int:
        """How many files there are whose writing was cut off by a crash."""
        with self.exclusive():
            leftovers = list(self.folder.writing.iterdir())
            for path in leftovers if remove else ():
                path.unlink()
            return len(leftovers)

    def verify(self, *, repair: bool, on_progress: Callable[[int, int], None]) -> VerifyReport:
        """Compare catalog and files, and check every header and layer; see `KVStore.verify`. The store may be in use."""
        leftovers = self.leftovers(remove=repair)
        with self.exclusive():
            self.catalog.database.check()
            if (miscounted := self.catalog.is_miscounted()) and repair:
                self.catalog.count_anew()
        total, _ = self.size()
        entries = nbytes = 0
        found: dict[str, list[str]] = {"damaged": [], "missing": [], "mismatched": [], "orphans": []}
        for row in self.catalog.entries():
            digest = row.key.digest
            entries, nbytes = entries + 1, nbytes + row.bytes
            if (diagnosis := self._diagnose(row)) and digest in self:
                found[diagnosis].append(digest)
                if repair and diagnosis == "mismatched":
                    self.adopt(self.folder.entry_path(digest))
                elif repair:
                    self.set_aside(digest, range(row.layers))
            on_progress(entries, max(entries, total))
        for path in self.folder.entry_files():
            with self.exclusive():
                if path.name not in self.catalog and path.exists():
                    found["orphans"].append(path.name)
                    if repair:
                        self.adopt(path)
        digests = {kind: tuple(found_ones) for kind, found_ones in found.items()}
        unowned = self.catalog.count_unowned()
        return VerifyReport(entries, nbytes, unowned, leftovers=leftovers, miscounted=miscounted, repaired=repair, **digests)

    def _diagnose(self, row: CatalogEntry) -> str | None:
        path = self.folder.entry_path(row.key.digest)
        try:
            with EntryFile.open(path, row.key.digest) as file:
                for layer in range(file.info.num_layers):
                    file.read_layer(layer)
                found = self._row_of(file, path)
        except DamagedEntryError:
            return "damaged" if path.exists() else "missing"
        return None if found[:4] == row[:4] else "mismatched"  # all but the times

    def _row_of(self, file: EntryFile, path: Path) -> CatalogEntry:
        """The row that a file should have, as last used when it was written."""
        if path != self.folder.entry_path(file.info.key.digest):
            raise DamagedEntryError(f"{path} is not where its entry belongs")
        return _row(file.info, file.file_bytes, min(file.written_ns, time.time_ns()))

    def _correct_sizes(self) -> None:
        """Hold rows against their files before an opening evicts: a number that a bad disk altered must not empty the store."""
        wrong: list[tuple[int, str]] = []
        for row in self.catalog.entries():
            with suppress(FileNotFoundError):
                file_bytes = self.folder.entry_path(row.key.digest).stat().st_size
                if file_bytes != row.bytes:
                    wrong.append((file_bytes, row.key.digest))
        if wrong:
            logger.warning("the catalog was wrong about the sizes of %d files: they are noted as they are", len(wrong))
            self.catalog.count_anew(wrong)

    @contextmanager
    def _evicting(self, file_bytes: int, of_passages: Mapping[str, int] = MappingProxyType({})) -> Iterator[list[str]]:
        """Select the least recently used entries so that files of `file_bytes` fit, or for 0 as far as pins allow.

        Passages go first, and those of a namespace in any case for new ones (`of_passages` has their bytes) beyond its part.
        Inside, they count as misses and cannot be pinned.
        """
        victims: list[str] = []
        excess_bytes = self.size()[1] + file_bytes - self.budget_bytes
        try:
            for namespace, new_bytes in of_passages.items():
                held = self.catalog.passages(namespace)
                beyond_bytes = new_bytes + sum(entry_bytes for _, entry_bytes in held) - self.budget_bytes // PASSAGES_PART
                for digest, entry_bytes in held:
                    if beyond_bytes > 0 and self._pins.begin_evict(digest):
                        victims.append(digest)
                        beyond_bytes, excess_bytes = beyond_bytes - entry_bytes, excess_bytes - entry_bytes
            if excess_bytes > 0 and file_bytes <= self.budget_bytes:
                for digest, entry_bytes in self.catalog.evictable():
                    if not self._pins.is_evicting(digest) and self._pins.begin_evict(digest):
                        victims.append(digest)
                        excess_bytes -= entry_bytes
                    if excess_bytes <= 0:
                        break
            if excess_bytes > 0 and file_bytes:
                budget = f"nvme_budget_bytes={self.budget_bytes} beside what is pinned; raise it, or split the chunk"
                raise StoreFullError(f"an entry of {file_bytes} bytes does not fit {budget}")
            yield victims
            self.evictions += len(victims)
        finally:
            self._pins.end_evict(victims)

    def _drop_damaged(self, digest: str, damage: DamagedEntryError) -> None:
        self.damaged += 1
        try:
            with self.changing([digest]):
                self.catalog.change(remove=[digest])
                self.folder.set_aside(self.folder.entry_path(digest), damage)
        except (StoreError, OSError) as error:
            logger.error("the damaged entry %s (%s) cannot be set aside: %s", digest, damage, error)

    def _finish(self, digests: Sequence[str]) -> None:
        """End the change of a process that died in it: what the catalog shows is made, what it does not show is not."""
        try:
            self.catalog.database.settle()
            lost = [digest for digest in digests if digest in self.catalog and not self.folder.entry_path(digest).exists()]
            self.catalog.change(remove=lost)  # on a full disk files go first
        except StoreFullError as error:  # deleting entries must work all the same
            logger.warning("%s; should this process die too, run `cacheblend store verify`", error)
        self._end_change(digests)

    def _end_change(self, digests: Sequence[str]) -> None:
        try:
            for digest in digests:
                if digest not in self.catalog:
                    for path in (self.folder.writing / digest, self.folder.entry_path(digest)):
                        path.unlink(missing_ok=True)
            self._journal.end()
            self.reserve.refill()
        except (OSError, StoreError) as error:
            logger.warning("files of entries that are gone stay until the next change: %s", error)

    def _entries_of_files(self) -> Iterator[CatalogEntry]:
        """Rows from the headers of all files, to make the catalog again. A layer is checked when it is read."""
        count = 0
        for path in self.folder.entry_files():
            try:
                with EntryFile.open(path, path.name) as file:
                    yield self._row_of(file, path)
                count += 1
            except DamagedEntryError as damage:
                self.folder.set_aside(path, damage)
        if count:
            logger.warning("%s was gone: made again from %d files; no document is known", self.folder.catalog, count)


def _row(info: EntryInfo, file_bytes: int, used_ns: int) -> CatalogEntry:
    return CatalogEntry(info.key, len(info.token_ids), info.num_layers, file_bytes, used_ns, used_ns)
