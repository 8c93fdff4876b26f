"""Isolation in a shared remote tier: no tenant finds, names, makes or uses another's entries."""

import itertools
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from chunks import MODEL, make_chunk, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import SECRET, OpenShared, remote_of

from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.remote.backend import ObjectRange
from cacheblend.store.remote.object_format import ObjectFormat
from cacheblend.store.remote.transfer import list_entries

TENANTS = (None, "one", "two")
NAMESPACES = st.sampled_from(["", "a", "b", "a\0b"])
TEXTS = st.integers(0, 2)
STEP = st.tuples(st.sampled_from(["put", "get", "delete"]), st.sampled_from("ab"), st.sampled_from(TENANTS), NAMESPACES, TEXTS)


def chunk_of(namespace: str, text: int, tenant: str | None = None) -> tuple[ChunkKey, ChunkKV]:
    """A chunk whose values depend on its tenant and namespace, so that another's would be seen; its key on the namespace."""
    seed = 100 * TENANTS.index(tenant) + 10 * ["", "a", "b", "a\0b"].index(namespace) + text
    _, kv = make_chunk(seed)
    ids = list(range(100 * text, 100 * text + 5))
    own = ChunkKV(kv.layers, ids, (1,), MODEL)
    return ChunkKey.of(ids, prefix_ids=(1,), model=MODEL, namespace=namespace), own


@given(steps=st.lists(STEP, max_size=12), secret=st.sampled_from([None, SECRET]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_finds_another_tenants_or_namespaces_entry(
    steps: list[tuple[str, str, str | None, str, int]], secret: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever tenants put, get and delete at two replicas, each gets its own bytes or a miss, and counts its hits alone."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    folder = tmp_path_factory.mktemp("shared")
    there: set[tuple[str | None, str, int]] = set()

    def open_one(replica: str, tenant: str | None) -> KVStore:
        return KVStore(
            StoreConfig(
                directory=folder / replica / str(tenant),
                remote=f"file://{folder}/objects",
                remote_secret=secret,
                remote_tenant=tenant,
            )
        )

    with ExitStack() as stack:
        used = {tenant for _, _, tenant, _, _ in steps}
        replicas = {(name, tenant): stack.enter_context(open_one(name, tenant)) for tenant in used for name in "ab"}
        for step, at, tenant, namespace, text in steps:
            store, (key, kv) = replicas[at, tenant], chunk_of(namespace, text, tenant)
            before = {each: hits(replica) for each, replica in replicas.items()}
            found = None
            if step == "put":
                store.put(key, kv)
                there.add((tenant, namespace, text))
            elif step == "delete":
                for name in "ab":
                    replicas[name, tenant].delete(key)
                there.discard((tenant, namespace, text))
            else:
                found = store.get(key)
                assert same(found, kv) if (tenant, namespace, text) in there else found is None
            before[at, tenant] += found is not None
            assert {each: hits(replica) for each, replica in replicas.items()} == before
            for each in replicas.values():
                assert each.flush_remote(10)
        # What no tenant has deleted is in the remote tier, for its own replicas to come; nothing else is.
        for tenant in TENANTS:
            with open_one("new", tenant) as store:
                for namespace, text in itertools.product(["", "a", "b", "a\0b"], range(3)):
                    key, kv = chunk_of(namespace, text, tenant)
                    found = store.get(key)
                    assert same(found, kv) if (tenant, namespace, text) in there else found is None
                assert sum(entry is not None for _, _, entry in list_entries(remote_of(store))) == sum(
                    one == tenant for one, _, _ in there
                )


def hits(store: KVStore) -> int:
    stats = store.stats()
    return sum(tier.hits for tier in stats.tiers.values()) + (stats.remote.hits if stats.remote else 0)


SECRETS = st.none() | st.binary(min_size=16)


@given(
    a=NAMESPACES, b=NAMESPACES, text=TEXTS, other=TEXTS, secrets=st.tuples(SECRETS, SECRETS), tenant=st.sampled_from(TENANTS)
)
@settings(max_examples=100, deadline=None)
def test_names_are_equal_for_equal_keys_tenants_and_secrets_alone(
    a: str, b: str, text: int, other: int, secrets: tuple[bytes | None, bytes | None], tenant: str | None
) -> None:
    """An object's name follows from tenant, salt, text and the deployment's secret, and is another for any other of them."""
    one, two = (ObjectFormat(secret, tenant) for secret in secrets)
    first, second = chunk_of(a, text)[0].digest, chunk_of(b, other)[0].digest
    assert (one.name(first) == one.name(second)) == ((a, text) == (b, other))
    assert (one.name(first) == two.name(first)) == (secrets[0] == secrets[1])
    assert (one.name(first) == ObjectFormat(secrets[0], "two").name(first)) == (tenant == "two")
    assert (one.name(first) == first) == (secrets[0] is None and tenant is None)


def test_who_has_no_secret_cannot_name_list_or_poison(open_shared: OpenShared, tmp_path: Path) -> None:
    """With write access and no secret: keys do not give objects' names, and objects that were made or moved are not used."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    url = f"file://{tmp_path}/objects"
    store = open_shared("owner", url, remote_secret=SECRET)
    (key, kv), (other_key, other_kv) = make_chunk(1), make_chunk(2)
    store.put(key, kv)
    store.put(other_key, other_kv)
    assert store.flush_remote(10)
    attacker = remote_of(open_shared("attacker", url))
    names = dict(attacker.backend.ls())
    owner = remote_of(store).format
    assert attacker.backend.sizes([key.digest]) == [None]
    assert key.digest not in names
    # 1. An entry of the attacker's own making, in every form that can be made without the secret.
    zeros = ChunkKV([(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv.layers], kv.token_ids, kv.prefix_ids, kv.model)
    poison = EncodedEntry.of(key, zeros)
    forged = [attacker.format.pack(poison), ObjectFormat(b"a guessed secret").pack(poison)]
    # 2. Another entry's object, and this one's header before another's layers.
    with attacker.reader() as reader:
        reader.request([ObjectRange(owner.name(each.digest), 0, 2**20) for each in (key, other_key)])
        mine, others = reader.receive(), reader.receive()
    assert mine is not None
    assert others is not None
    front = len(mine) - poison.nbytes
    forged += [[others], [mine[:front], others[front:]], [mine[:front], *poison.pieces]]
    for at, parts in enumerate(forged):
        attacker.backend.put(owner.name(key.digest), [np.ascontiguousarray(part) for part in parts])
        victim = open_shared(f"victim{at}", url, remote_secret=SECRET)
        assert victim.get(key) is None
        stats = victim.stats().remote
        assert stats is not None
        assert stats.damaged == 1
    # 3. The bytes that were written, put back: that is all that can be replayed.
    attacker.backend.put(owner.name(key.digest), [mine])
    assert same(open_shared("last", url, remote_secret=SECRET).get(key), kv)


def test_a_header_that_is_not_its_keys_is_no_entry(open_shared: OpenShared, tmp_path: Path) -> None:
    """Without a secret too, an object whose header names other tokens or another tenant than its key is damaged."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    url = f"file://{tmp_path}/objects"
    store = open_shared("owner", url)
    _, kv = make_chunk(1)
    mine = ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=MODEL, namespace="mine")
    lie = EncodedEntry.of(ChunkKey(mine.digest, MODEL, "raw", "yours"), ChunkKV(kv.layers, kv.token_ids, kv.prefix_ids))
    other = ChunkKV(kv.layers, [9, *kv.token_ids[1:]], kv.prefix_ids)
    lies = [lie, EncodedEntry.of(mine, other)]
    for at, lie in enumerate(lies):
        remote_of(store).backend.delete([mine.digest])
        remote_of(store).send([lie])
        reader = open_shared(f"reader{at}", url)
        assert reader.get(mine) is None
        assert remote_of(reader).stats().damaged == 1


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_header_with_a_text_that_is_none_is_damaged(open_shared: OpenShared, tmp_path: Path, secret: str | None) -> None:
    """Headers whose checksums are right and whose names are no Unicode, or whose sizes are none, are damaged, and no errors."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    url = f"file://{tmp_path}/objects"
    store = open_shared("owner", url, remote_secret=secret)
    (key, kv), (other, other_kv) = make_chunk(1), make_chunk(2)
    store.put(key, kv)
    store.put(other, other_kv)
    assert store.flush_remote(10)
    remote = remote_of(store)
    name = remote.format.name(key.digest)
    with remote.reader() as reader:
        reader.request([ObjectRange(name, 0, 2**20)])
        good = reader.receive()
    assert good is not None
    start = 4096 if secret else 0
    for at, lie in enumerate(({"namespace": "\ud800"}, {"model": "\ud800"}, {"key": "\ud800"}, {"heads": [[2, 4.0]] * 3})):
        bad = rewritten(good.tobytes(), start, lie)
        remote.backend.put(name, [np.frombuffer(bad, np.uint8)])
        reader_of = open_shared(f"reader{at}", url, remote_secret=secret)
        with reader_of.pin([key, other]) as placements:
            assert [placement is None for placement in placements] == [True, False]
        assert remote_of(reader_of).entries([name]) == [None]
        assert remote_of(reader_of).stats().damaged == 1


def rewritten(good: bytes, start: int, lie: dict[str, object]) -> bytes:
    """An object whose header says something else, with a checksum that fits."""
    end = start + 8 + int.from_bytes(good[start : start + 8], "little")
    header = json.loads(good[start + 8 : end])
    text = json.dumps(json.loads(header["__metadata__"]["entry"]) | lie)
    header["__metadata__"] = {"entry": text, "entry_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}
    raw = json.dumps(header).encode()
    assert len(raw) <= end - start - 8
    return good[: start + 8] + raw.ljust(end - start - 8) + good[end:]
