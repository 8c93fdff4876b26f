"""Any run of puts, gets, pins, deletes, documents, damage, kills and reopenings keeps the store's promises."""

import shutil
import tempfile
from contextlib import ExitStack

import pytest
import torch
from chunks import FILE_BYTES, RAM_BYTES, documents_of, file_of, make_chunk, same
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheblend.base.errors import InputError, StoreFullError
from cacheblend.store import KVStore, StoreConfig

pytestmark = pytest.mark.contract

PAIRS = [make_chunk(seed) for seed in range(6)]
CHUNKS = st.integers(0, 5)
NVME_ENTRIES, RAM_ENTRIES = 3, 2


class StoreMachine(RuleBasedStateMachine):
    """A store of three entries on NVMe and two in RAM beside a list of what must be there, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.used: list[int] = []
        self.pins: list[tuple[ExitStack, list[int]]] = []
        self.damaged: set[int] = set()
        self.documents: dict[str, tuple[str, set[int]]] = {}
        self.open()

    def open(self) -> None:
        self.store = KVStore(
            StoreConfig(
                directory=self.folder, nvme_budget_bytes=NVME_ENTRIES * FILE_BYTES, ram_budget_bytes=RAM_ENTRIES * RAM_BYTES
            )
        )

    def use(self, chunk: int) -> None:
        self.used = [other for other in self.used if other != chunk] + [chunk]

    def pinned(self) -> set[int]:
        """Chunks that no eviction may take."""
        return {chunk for _, chunks in self.pins for chunk in chunks}

    def drop(self, chunks: set[int]) -> None:
        """Forget chunks that no document has any more."""
        gone = {chunk for chunk in chunks if all(chunk not in others for _, others in self.documents.values())}
        self.used = [chunk for chunk in self.used if chunk not in gone]
        self.damaged -= gone

    @rule(chunk=CHUNKS, flush=st.booleans())
    def put(self, chunk: int, flush: bool) -> None:
        victims = [other for other in self.used if other not in self.pinned()]
        full = chunk not in self.used and len(self.used) == NVME_ENTRIES
        try:
            self.store.put(*PAIRS[chunk], flush=flush).result()
            self.store.flush()
        except StoreFullError:
            assert full
            assert not victims
            return
        if full:
            self.used.remove(victims[0])
            self.damaged.discard(victims[0])
        self.use(chunk)

    @rule(chunk=CHUNKS)
    def get(self, chunk: int) -> None:
        got = self.store.get(PAIRS[chunk][0])
        if chunk in self.damaged and got is None:
            self.used.remove(chunk)
            self.damaged.discard(chunk)
        elif chunk in self.used:
            assert same(got, PAIRS[chunk][1])
            self.use(chunk)
        elif got is not None:
            assert same(got, PAIRS[chunk][1])

    @rule(chunks=st.lists(CHUNKS, min_size=1, max_size=3))
    @precondition(lambda self: not self.damaged)
    def pin(self, chunks: list[int]) -> None:
        stack = ExitStack()
        placements = stack.enter_context(self.store.pin([PAIRS[chunk][0] for chunk in chunks]))
        self.pins.append((stack, chunks))
        for chunk, placement in zip(chunks, placements, strict=True):
            assert (placement is not None) == (chunk in self.used)
            if placement is not None:
                assert torch.equal(placement.read_layer(1)[0], PAIRS[chunk][1].layers[1][0])
                self.use(chunk)

    @rule()
    @precondition(lambda self: self.pins)
    def release(self) -> None:
        self.pins.pop(0)[0].close()

    @rule(chunk=CHUNKS)
    def delete(self, chunk: int) -> None:
        assert self.store.delete(PAIRS[chunk][0]) == (chunk in self.used)
        self.used = [other for other in self.used if other != chunk]
        self.damaged.discard(chunk)

    @rule(name=st.sampled_from("ab"), version=st.sampled_from("12"), chunks=st.sets(CHUNKS, max_size=3))
    def put_document(self, name: str, version: str, chunks: set[int]) -> None:
        self.store.documents.put([(name, version, [PAIRS[chunk][0] for chunk in chunks])])
        old_version, old = self.documents.get(name, (version, set()))
        self.documents[name] = (version, chunks | old if version == old_version else chunks)
        self.drop(old)

    @rule(name=st.sampled_from("ab"))
    def delete_document(self, name: str) -> None:
        if name not in self.documents:
            with pytest.raises(InputError, match=name):
                self.store.documents.delete(name)
            return
        self.store.documents.delete(name)
        self.drop(self.documents.pop(name)[1])

    @rule()
    @precondition(lambda self: not self.pins)
    def kill(self) -> None:
        """Go on with what is on the disk at this moment."""
        killed, folder = self.store, tempfile.mkdtemp()
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        killed.close()
        shutil.rmtree(self.folder)
        self.folder = folder
        self.open()

    @rule(chunk=CHUNKS)
    @precondition(lambda self: not self.pins)
    def damage(self, chunk: int) -> None:
        if chunk in self.used:
            self.close()
            path = file_of(self.store, PAIRS[chunk][0])
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 255
            path.write_bytes(raw)
            self.damaged ^= {chunk}
            self.open()

    @rule()
    @precondition(lambda self: not self.pins)
    def reopen(self) -> None:
        self.close()
        self.open()

    @rule()
    def repair(self) -> None:
        report = self.store.verify(repair=True)
        assert set(report.damaged) == {str(PAIRS[chunk][0]) for chunk in self.damaged}
        assert not report.orphans
        assert not report.missing
        assert not report.mismatched
        assert not report.miscounted
        self.used = [chunk for chunk in self.used if chunk not in self.damaged]
        self.damaged.clear()

    @invariant()
    def keeps_its_promises(self) -> None:
        assert [row.key for row in self.store.ls()] == [PAIRS[chunk][0] for chunk in self.used]
        found = {document.id: document for document in documents_of(self.store)}
        assert set(found) == set(self.documents)
        for name, (version, chunks) in self.documents.items():
            stored = chunks & set(self.used)
            assert found[name].version == version
            assert (found[name].chunks, found[name].stored_bytes) == (len(chunks), len(stored) * FILE_BYTES)
        stats = self.store.stats()
        assert stats.nvme.bytes == len(self.used) * FILE_BYTES <= NVME_ENTRIES * FILE_BYTES
        assert stats.ram.bytes == stats.ram.entries * RAM_BYTES <= RAM_ENTRIES * RAM_BYTES

    def close(self) -> None:
        for stack, _ in self.pins:
            stack.close()
        self.pins.clear()
        self.store.close()

    def teardown(self) -> None:
        self.close()
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=set(Phase) - {Phase.explain},  # it traces every line, which takes longer than all the rest
)
