"""What the guard finds is told by tenant and model, and by no salt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api import MODEL, listening
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.blend import FusionConfig
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import EngineConfig
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key, new_key
from cacheblend.service.http.server import Server
from cacheblend.service.serving.config import ServingConfig

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
KEYS = {name: new_key() for name in ("one", "two")}


@pytest.fixture
def client(model_dir: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """A service of two tenants that checks every blended request against a floor that cannot be met."""
    tenants = [TenantConfig(name=name, api_key_sha256=(hash_key(key),)) for name, key in KEYS.items()]
    config = EngineConfig(
        model=str(model_dir),
        store_dir=tmp_path,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    serving = ServingConfig(guard_share=1.0, guard_floor=1.0, guard_tokens=40, guard_window=1)
    with (
        Server(config, serving, HttpConfig(served_model_name=MODEL), tenants, embedder=FakeEmbedder()) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def test_metrics_and_store(client: httpx.Client) -> None:
    """Counters and `/v1/store` show how many were compared, how they agreed, and who is recomputed in full, by tenant."""
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    assert client.post("/v1/documents", json={"documents": DOCUMENTS}, headers=one).status_code == 201

    def ask(checked: int, **options: object) -> float | None:
        answer = client.post("/v1/chat/completions", json={**CHAT, **options}, headers=one).json()
        wait_until(lambda: client.get("/v1/store", headers=one).json()["quality"]["evaluated"] >= checked)
        return answer["cacheblend"]["recompute_ratio"]

    assert [ask(number) for number in (1, 2, 3)] == [0.15, None, None]
    assert ask(3, cache_salt="secret-salt") is None
    assert ask(3, recompute_ratio=0.3) == 0.3
    quality = client.get("/v1/store", headers=one).json()["quality"]
    assert quality["full_recompute"]
    assert quality["floor"] == 1.0
    assert client.get("/v1/store", headers=two).json()["quality"] == {
        "evaluated": 0,
        "agreement": None,
        "first_token_kl_nats": None,
        "floor": 1.0,
        "full_recompute": False,
    }
    metrics = client.get("/metrics").text

    def value(name: str, **labels: str) -> float:
        wanted = ",".join(f'{key}="{label}"' for key, label in sorted(labels.items()))
        found = re.search(rf"^cacheblend_{name}{{{wanted}}} (\S+)$", metrics, re.MULTILINE)
        assert found, f"{name}{{{wanted}}}"
        return float(found[1])

    common = {"namespace": "one", "model": MODEL}
    assert value("shadow_evaluations_total", **common, outcome="compared") == 3
    assert value("guard_full_recompute", **common) == 1.0
    for histogram in ("agreement", "first_token_kl_nats", "relative_kv_error"):
        assert value(f"guard_{histogram}_count", **common) == 3
        assert value(f"guard_{histogram}_sum", **common) > 0
    assert "secret-salt" not in metrics
    assert 'namespace="two"' not in metrics
