"""A flood of one tenant takes nothing from another, and salts share nothing: hits, evictions, answers, lists are counted."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import MODEL, bearer, serving_tenants
from engines import CHUNK_TOKENS, DOCUMENTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import SECRET, needs

from cacheblend.base.errors import ConfigError
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.request import namespace_of
from cacheblend.service.http.config import TenantConfig, engine_configs
from cacheblend.store import StoreConfig

ENTRY_BYTES = 4096 + 4 * 2 * 2 * 16 * 4 * CHUNK_TOKENS  # header; 4 layers, keys and values, 2 heads of 16 float32 a token
BLOCK_BYTES = 4 * 2 * 2 * 16 * 4 * 16
NAMES = ("one", "two")
SALTS = ("salt-of-alice", "salt-of-bob")


def budgets(entries: int) -> dict[str, int]:
    """Room for entries, half of them in RAM too, and twice as many prefix blocks."""
    return {
        "ram_budget_bytes": entries * ENTRY_BYTES // 2,
        "nvme_budget_bytes": entries * ENTRY_BYTES,
        "prefix_budget_bytes": 2 * entries * BLOCK_BYTES,
    }


class Tenant:
    """A tenant's client, and its engine for what the API does not tell."""

    def __init__(self, address: str, name: str, engine: Engine, stack: ExitStack) -> None:
        self.engine = engine
        self.http = stack.enter_context(httpx.Client(base_url=address, timeout=60, headers=bearer(name)))

    def ask(self, text: str, cache_salt: str = "", **options: Any) -> dict[str, Any]:
        """A chat over a text that the request brings; its missing chunks are stored when this returns."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "What?"}], "max_tokens": 2, "cache_salt": cache_salt}
        response = self.http.post("/v1/chat/completions", json={**body, "documents": [{"text": text}], **options})
        assert response.status_code == 200, response.text
        self.engine.drain()
        return response.json()

    def chat(self, text: str, cache_salt: str = "") -> int:
        """A chat without chunks; how many of its tokens were found in prefix blocks."""
        answer = self.ask(
            text,
            cache_salt,
            documents=None,
            num_chunks=0,
            method="prefix_cache",
            messages=[{"role": "system", "content": text}, {"role": "user", "content": "What?"}],
        )
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def store(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/store").json())

    def entries(self, cache_salt: str = "") -> set[str]:
        """Keys of what is stored for a salt."""
        return {str(entry.key) for entry in self.engine.store.ls() if entry.key.namespace == namespace_of(cache_salt)}


@contextmanager
def two_tenants(model_dir: Path, store_dir: Path, remote: str | None = None) -> Iterator[dict[str, Tenant]]:
    """Two tenants on one server, with room for 40 entries each."""
    options = {
        "context_document_tokens": 0,  # so that a text's chunks are one another's equals, whatever stands before them
        "remote": remote,
        "remote_secret": SECRET if remote else None,
        **budgets(80),
    }
    with serving_tenants(NAMES, model_dir, store_dir, **options) as (server, address), ExitStack() as stack:
        yield {name: Tenant(address, name, server.engines[name], stack) for name in NAMES}


@pytest.fixture
def tenants(model_dir: Path, tmp_path: Path) -> Iterator[dict[str, Tenant]]:
    """Those of a server that shares nothing."""
    with two_tenants(model_dir, tmp_path) as tenants:
        yield tenants


@pytest.fixture(scope="module")
def replicas(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Tenant]]]:
    """The tenants of two servers that share a remote tier."""
    needs("obstore", "objects")
    folder = tmp_path_factory.mktemp("shared")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend.loader.estimators.SLOW_START_S", 60.0)  # a late answer would be a miss
        remote = f"file://{folder}/objects"
        yield [stack.enter_context(two_tenants(model_dir, folder / name, remote)) for name in "ab"]


def text_of(number: int) -> str:
    """A text of a few chunks that no other number's has."""
    return " ".join(f"w{number}x{place}" for place in range(9))


def flood(tenant: Tenant, salts: Sequence[str]) -> None:
    """Bring more texts and prompts than the tenant has room for; a full store takes a text that is asked about again.

    The tenant's budget holds, and the last text is found.
    """
    for number, salt in zip(range(100, 122), itertools.cycle(salts), strict=False):
        for _ in range(2):
            tenant.ask(text_of(number), salt)
    for number, salt in zip(range(100, 115), itertools.cycle(salts), strict=False):
        tenant.chat(text_of(number) * 4, salt)
    stats = tenant.store()
    assert all(stats[part]["evictions"] > 0 for part in ("ram", "nvme", "prefix"))
    assert stats["nvme"]["bytes"] <= stats["nvme"]["budget_bytes"] == 40 * ENTRY_BYTES
    assert stats["failed_writes"] == 0
    assert tenant.ask(text_of(121), salts[21 % len(salts)])["cacheblend"]["misses"] == 0


def test_a_tenant_floods(tenants: dict[str, Tenant]) -> None:
    """The other tenant loses no entry and no block, hits what it hit before, and is shown nothing of the flood, which comes
    with one salt, with none, and with a new one for each text.
    """
    one, two = tenants["one"], tenants["two"]
    assert two.http.post("/v1/documents?wait=true", json={"documents": DOCUMENTS[:1]}).status_code == 201
    two.ask(text_of(1), SALTS[0])
    two.chat(text_of(1) * 4)
    held, hits = two.entries(), two.store()["ram"]["hits"]
    for salts in ([SALTS[0]], [""], [f"salt-{number}" for number in range(22)]):
        flood(one, salts)
    after = two.store()
    assert two.entries() == held
    assert [after[part]["evictions"] for part in ("ram", "nvme", "prefix")] == [0, 0, 0]
    assert after["ram"]["hits"] == hits
    assert two.ask(text_of(1), SALTS[0])["cacheblend"]["misses"] == 0
    assert two.chat(text_of(1) * 4) > 0
    assert [document["id"] for document in two.http.get("/v1/documents").json()["data"]] == [DOCUMENTS[0]["id"]]
    assert one.http.get("/v1/documents").json()["data"] == []
    assert one.http.get(f"/v1/documents/{DOCUMENTS[0]['id']}").status_code == 404


def test_salts_share_nothing(tenants: dict[str, Tenant]) -> None:
    """No token of an answer is cached for a salt that has not asked before, and no counter, list or file has a salt's name."""
    tenant = tenants["one"]
    own_system = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What?"}]  # not the service's head
    for salt in ("", *SALTS):
        first, second = (tenant.ask(text_of(1), salt, messages=own_system) for _ in range(2))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert tenant.chat(text_of(2) * 4, salt) == 0
        assert tenant.chat(text_of(2) * 4, salt) > 0
    metrics = tenant.http.get("/metrics").text
    for salt in SALTS:
        assert not any(name in text for name in (salt, namespace_of(salt)) for text in (metrics, str(tenant.store())))
        folder = Path(tenant.engine.config.store_dir)
        assert not [file for file in folder.rglob("*") if file.is_file() and salt.encode() in file.read_bytes()]
    assert tenant.store()["prefix"]["hits"] > 0


STEP = st.tuples(
    st.sampled_from(["ask", "upload", "delete"]),
    st.integers(0, 1),
    st.sampled_from(NAMES),
    st.sampled_from(["", *SALTS]),
    st.integers(0, 1),
)
NUMBERS = itertools.count(1000, 2)


@given(steps=st.lists(STEP, min_size=3, max_size=8))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tenants_of_replicas_share_nothing_in_the_remote_tier(
    steps: list[tuple[str, int, str, str, int]], replicas: list[dict[str, Tenant]]
) -> None:
    """Whatever is asked, uploaded and deleted at two servers with one remote tier, a text is found by the tenant and salt that
    brought it, at both servers; another's answer, hits and remote hits tell nothing of it, and its deletion takes nothing away.
    """
    own = next(NUMBERS)  # no text of another example
    held: set[tuple[str, str, int]] = set()
    for step, at, name, salt, number in steps:
        tenant, text, id_ = replicas[at][name], text_of(own + number), f"{own}-{number}"
        before = remote_hits(replicas)
        if step == "upload":
            body = {"documents": [{"id": id_, "title": "", "text": text}]}
            assert tenant.http.post("/v1/documents?wait=true", json=body).status_code == 201
            held.add((name, "", number))
        elif step == "delete":
            for replica in replicas:
                replica[name].http.delete(f"/v1/documents/{id_}")
                for entry in replica[name].engine.store.ls():  # the copies of one that has not the document
                    replica[name].engine.store.delete(entry.key) if entry.key.namespace == "" else None
            held = {one for one in held if one[:2] != (name, "")}
        else:
            asked = tenant.ask(text, salt)["cacheblend"]
            assert asked["misses" if (name, salt, number) in held else "hits"] == 0
            held.add((name, salt, number))
        changed = {one for one, count in remote_hits(replicas).items() if count != before[one]}
        assert changed <= ({(at, name)} if (name, salt if step == "ask" else "", number) in held else set())
        for replica in replicas:
            for each in replica.values():
                each.engine.drain()
                assert each.engine.store.flush_remote(60)


def remote_hits(replicas: list[dict[str, Tenant]]) -> dict[tuple[int, str], int]:
    return {
        (at, name): tenant.store()["remote"]["hits"] for at, replica in enumerate(replicas) for name, tenant in replica.items()
    }


def test_tenants_divide_the_budgets() -> None:
    """Each tenant has an equal part; a budget of fewer bytes than there are tenants is refused, and no bound stays none."""
    tenants = [TenantConfig(name=f"t{number}", api_key_sha256=(f"{number:064x}",)) for number in range(3)]
    index = RetrieverConfig(index_budget_bytes=900)
    config = EngineConfig(model="m", store_dir="s", store=StoreConfig(ram_budget_bytes=900), retriever=index)
    for one in engine_configs(config, tenants).values():
        assert (one.store.ram_budget_bytes, one.retriever.index_budget_bytes) == (300, 300)
        assert one.store.nvme_budget_bytes == config.store.nvme_budget_bytes // 3
    unbound = EngineConfig(model="m", store_dir="s", store=StoreConfig(ram_budget_bytes=2))
    assert engine_configs(unbound, tenants[:1])["t0"].retriever.index_budget_bytes is None
    with pytest.raises(ConfigError, match="ram_budget_bytes=0"):
        engine_configs(unbound, tenants)
