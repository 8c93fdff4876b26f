"""KV that is written for a document is stored only while that is there, whoever deletes or replaces it."""

from chunks import MODEL, files_under, make_chunk, same

from cacheblend.store import ChunkKey, ChunkKV, KVStore

PAIRS = [make_chunk(seed) for seed in range(3)]
KEY, KV = PAIRS[0]
DOCUMENT = ("a", "1")


def salted(kv: ChunkKV) -> ChunkKey:
    return ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=MODEL, namespace="salt")


def test_a_document_that_is_there(open_store) -> None:
    """An entry of a known document is stored and goes with it, also where the document was noted without that chunk."""
    store = open_store()
    store.documents.put([(*DOCUMENT, [])])
    assert store.put(KEY, KV, document=DOCUMENT).result()
    assert store.put(*PAIRS[1], flush=False, document=DOCUMENT).result()
    assert store.documents.get("a").stored_chunks == 2
    assert store.documents.delete("a") == 2
    assert (store.ls(), files_under(store, "entries")) == ([], [])


def test_a_document_that_is_gone(open_store) -> None:
    """An entry of a document that the store does not know, or not in that version, leaves no row and no file."""
    store = open_store()
    assert not store.put(KEY, KV, document=DOCUMENT).result()
    store.documents.put([("a", "2", [])])
    assert not store.put(KEY, KV, document=DOCUMENT).result()
    assert not store.put(KEY, KV, flush=False, document=DOCUMENT).result()
    assert store.get(KEY) is None
    assert (store.ls(), files_under(store, "entries"), files_under(store, "writing")) == ([], [], [])
    assert store.verify().ok


def test_deleted_by_another_process_while_an_entry_waits(open_store) -> None:
    """The document is looked at in the commit that adds the row, not before; others of the group are stored."""
    store: KVStore = open_store()
    other: KVStore = open_store()
    store.documents.put([(*DOCUMENT, [KEY]), ("b", "1", [PAIRS[1][0]])])
    with store._nvme._lock._threads:  # holds this process's writer up, and not the other process
        writes = [
            store.put(KEY, KV, flush=False, document=DOCUMENT),
            store.put(*PAIRS[1], flush=False, document=("b", "1")),
            store.put(*PAIRS[2], flush=False),
        ]
        other.documents.delete("a")
    assert [write.result() for write in writes] == [False, True, True]
    assert KEY not in store
    assert store.get(KEY) is None
    assert store.stats().failed_writes == 0
    assert files_under(store, "entries") == sorted(str(key) for key, _ in PAIRS[1:])


def test_a_chunk_that_another_document_has(open_store) -> None:
    """A chunk of a document that is gone is stored where another document has it as well, and goes with that one."""
    store = open_store()
    store.documents.put([("b", "1", [KEY])])
    assert store.put(KEY, KV, document=DOCUMENT).result()
    assert same(store.get(KEY), KV)
    assert store.documents.ids() == ["b"]
    store.documents.delete("b")
    assert store.get(KEY) is None


def test_a_salts_entry_belongs_to_no_document(open_store) -> None:
    """A namespace's entry is stored while its document is there and goes by use then."""
    store = open_store()
    key = salted(KV)
    assert not store.put(key, KV, document=DOCUMENT).result()
    store.documents.put([(*DOCUMENT, [])])
    assert store.put(key, KV, document=DOCUMENT).result()
    assert store.documents.get("a").stored_chunks == 0
    store.documents.delete("a")
    assert store.get(key) is not None
