"""Entries on NVMe: their files and their rows in the catalogue, changed together, up to a byte budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .catalogue import Catalogue, CatalogueEntry
from .entry import EncodedEntry, EntryInfo
from .entry_file import EntryFile, write_file
from .entry_header import EntryHeader
from .errors import DamagedEntryError, StoreError, StoreFullError
from .pins import Pins
from .store_folder import StoreFolder
from .write_lock import WriteLock

logger = logging.getLogger(__name__)


class NvmeTier:
    """Files and rows of entries, the least recently used evicted first. Thread-safe, and safe among processes.

    A file is synced and renamed before its row is written; a row goes before its file. So a crash leaves a file without a
    row, which `verify` finds, never a row without a file. Every change is made under `exclusive`, which is re-entrant.
    """

    def __init__(self, folder: StoreFolder, budget_bytes: int, pins: Pins) -> None:
        self.folder, self.budget_bytes, self._pins = folder, budget_bytes, pins
        self.evictions, self.damaged = 0, 0
        with ExitStack() as opened:
            self.exclusive = WriteLock(folder.lock)
            opened.callback(self.exclusive.close)
            with self.exclusive:
                self.catalogue = Catalogue(folder.catalogue)
                opened.callback(self.catalogue.close)
                self.leftovers(remove=True)
                self.shrink()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close catalogue and lock; uses that were not saved are lost."""
        self._opened.close()

    def __contains__(self, digest: str) -> bool:
        return not self._pins.is_leaving(digest) and digest in self.catalogue

    def open(self, digest: str) -> EntryFile | None:
        """Open an entry's file and note its use; None for a miss. A damaged file is set aside and is a miss."""
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
        self.catalogue.touch(digest)
        return file

    def load(self, digest: str) -> EncodedEntry | None:
        """Read an entry; None for a miss. A damaged file is set aside and is a miss."""
        if (file := self.open(digest)) is None:
            return None
        with file:
            try:
                return file.load()
            except DamagedEntryError:
                self.set_aside(digest, range(file.info.layers))
                return None

    def write(self, entry: EncodedEntry) -> Sequence[str]:
        """Store an entry, durable on return; gives the digests of the entries that were evicted for it.

        Raises:
            StoreFullError: the disk is full, or the budget less what is pinned has no room.
            StoreDirectoryError: the folder cannot be written.

        """
        digest = entry.info.key.digest
        with self.exclusive:
            if digest in self.catalogue:
                self.catalogue.touch(digest)
                return ()
            header = EntryHeader.of(entry).pack()
            file_bytes = len(header) + entry.nbytes
            with self._making_room(file_bytes) as victims:
                path = self.folder.new_entry_path(digest)
                write_file(header, entry, self.folder.writing / digest, path)
                try:
                    self._list(entry.info, file_bytes, self.catalogue.now_ns(), remove=victims)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise
            self._unlink(victims)
            return victims

    def remove(self, digests: Iterable[str]) -> int:
        """Remove entries, pinned or not (who reads one keeps its file open); gives how many there were."""
        with self.exclusive:
            known = [digest for digest in digests if digest in self.catalogue]
            if known:
                self.catalogue.change(remove=known)
                self._unlink(known)
            return len(known)

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        """Move an entry's file away and drop the entry, unless header and these layers turn out to be good after all.

        They do where another thread or process has set the entry aside, or evicted it, and written it again since.
        """
        with self.exclusive:
            if digest not in self.catalogue:
                return
            path = self.folder.entry_path(digest)
            try:
                with EntryFile.open(path, digest) as file:
                    for layer in layers:
                        file.read_layer(layer)
                return
            except DamagedEntryError as damage:
                logger.warning("entry %s is a miss and set aside in %s: %s", digest, self.folder.damaged, damage)
            self.damaged += 1
            try:
                self.catalogue.change(remove=[digest])
                with suppress(FileNotFoundError):
                    os.replace(path, self.folder.damaged / digest)
            except (StoreError, OSError) as error:
                logger.error("the damaged entry %s cannot be set aside: %s", digest, error)

    def adopt(self, path: Path) -> None:
        """Enter a file that has no row into the catalogue, as last used when it was written; set it aside if it is damaged."""
        digest = path.name
        with self.exclusive:
            try:
                with EntryFile.open(path, digest) as file:
                    file.load()
                    if path != self.folder.entry_path(digest):
                        raise DamagedEntryError(f"{path} is not where its entry belongs")
                    self._list(file.info, file.file_bytes, min(path.stat().st_mtime_ns, self.catalogue.now_ns()))
            except DamagedEntryError as damage:
                logger.warning("a file without an entry is set aside in %s: %s", self.folder.damaged, damage)
                os.replace(path, self.folder.damaged / digest)

    def clear(self) -> None:
        """Remove every entry, and the files that were set aside."""
        with self.exclusive:
            self.remove(row.key.digest for row in self.catalogue.entries())
            for path in self.folder.damaged.iterdir():
                path.unlink()

    def shrink(self) -> Sequence[str]:
        """Evict entries until the budget holds, as far as pins allow; gives their digests."""
        with self.exclusive, self._making_room(0) as victims:
            if victims:
                self.catalogue.change(remove=victims)
                self._unlink(victims)
            return victims

    def leftovers(self, *, remove: bool) -> int:
        """How many files there are whose writing was cut off by a crash."""
        with self.exclusive:
            leftovers = list(self.folder.writing.iterdir())
            for path in leftovers if remove else ():
                path.unlink()
            return len(leftovers)

    @contextmanager
    def _making_room(self, file_bytes: int) -> Iterator[list[str]]:
        """Choose entries to evict until an entry of `file_bytes` fits; inside, they count as misses and cannot be pinned."""
        excess = self.catalogue.totals()[1] + file_bytes - self.budget_bytes
        victims: list[str] = []
        try:
            if excess > 0 and file_bytes <= self.budget_bytes:
                for digest, victim_bytes in self.catalogue.by_use():
                    if self._pins.start_leaving(digest):
                        victims.append(digest)
                        excess -= victim_bytes
                        if excess <= 0:
                            break
            if excess > 0 and file_bytes:
                raise StoreFullError(
                    f"an entry of {file_bytes} bytes does not fit nvme_budget_bytes={self.budget_bytes} beside what is "
                    "pinned; raise the budget, split the chunk, or release pins"
                )
            yield victims
            self.evictions += len(victims)
        finally:
            self._pins.stop_leaving(victims)

    def _list(self, info: EntryInfo, file_bytes: int, used_ns: int, remove: Iterable[str] = ()) -> None:
        row = CatalogueEntry(info.key, len(info.token_ids), info.layers, file_bytes, used_ns, used_ns)
        self.catalogue.change(add=row, remove=remove)

    def _unlink(self, digests: Iterable[str]) -> None:
        for digest in digests:
            try:
                self.folder.entry_path(digest).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the file of the removed entry %s stays: %s", digest, error)
