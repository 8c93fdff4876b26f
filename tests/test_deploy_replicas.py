"""What is shipped to deploy replicas with: read by the programs that will read it, where they are installed."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheblend.base.options import options_of
from cacheblend.service import EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.serving.config import ServingConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = yaml.safe_load((DEPLOY / "replicas.yaml").read_text())
VARIABLES = {option.variable for option in options_of(EngineConfig, ServingConfig, HttpConfig).values()}
REPLICAS = 3


def program(name: str) -> str:
    """The path of a program; skips where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def resources() -> list[dict[str, Any]]:
    """What the Kustomize base comes to."""
    done = subprocess.run([program("kubectl"), "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def test_compose_is_closed() -> None:
    """Every service has a read-only root and no capabilities; the balancer alone is reached, and from this machine alone."""
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service.get("ports", []) == (["127.0.0.1:8080:8080"] if name == "balancer" else [])
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    replicas = [COMPOSE["services"][f"replica-{number}"] for number in (1, 2)]
    assert replicas[0]["environment"] == replicas[1]["environment"]
    assert replicas[0]["volumes"] != replicas[1]["volumes"], "each has a store of its own"
    own = {name for name in replicas[0]["environment"] if name.startswith("CACHEBLEND_")}
    assert own - {"CACHEBLEND_MODEL"} <= VARIABLES
    for secret in ("CACHEBLEND_API_KEY", "CACHEBLEND_REMOTE_SECRET", "PGPASSWORD"):
        assert ":?" in replicas[0]["environment"][secret], f"no {secret}, no start"


def test_the_base_is_valid(resources: list[dict[str, Any]]) -> None:
    """Every resource is one of Kubernetes' own schema."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for resource in resources:
        validate.validate(resource, "1.33", strict=True)


def test_the_base_is_closed_and_bounded(resources: list[dict[str, Any]]) -> None:
    """No container is root or writes outside its volumes, all have requests, a limit and probes, and no secret is there."""
    kinds = defaultdict[str, set[str]](set)
    for resource in resources:
        kinds[resource["kind"]].add(resource["metadata"]["name"])
        for container in containers(resource):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            if container["name"] != "model":
                assert {"readinessProbe", "livenessProbe"} <= set(container)
        if resource["kind"] in ("Deployment", "StatefulSet"):
            assert resource["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    assert kinds["StatefulSet"] == {"cacheblend", "postgres"}
    assert "Secret" not in kinds
    server = next(each for each in resources if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "cacheblend")
    assert server["spec"]["replicas"] >= 2
    [container] = server["spec"]["template"]["spec"]["containers"]
    own = {each["name"] for each in container["env"] if each["name"].startswith("CACHEBLEND_")}
    assert own - {"CACHEBLEND_MODEL"} <= VARIABLES
    plain = {each["name"]: each.get("value") for each in container["env"]}
    hosts = {"postgres": plain["CACHEBLEND_INDEX"], "redis": plain["CACHEBLEND_REMOTE"]}
    for name, url in hosts.items():
        assert f"//{name}" in str(url) or f"@{name}" in str(url)
        assert name in kinds["Service"]


class Replica(http.server.BaseHTTPRequestHandler):
    """Answers with the name of its server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = str(self.server.server_port).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def balanced(tmp_path: Path) -> Iterator[tuple[str, dict[str, http.server.ThreadingHTTPServer]]]:
    """The address of a balancer of our configuration, and the servers behind it, by what they answer."""
    haproxy = program("haproxy")
    with ExitStack() as opened:
        servers: dict[str, http.server.ThreadingHTTPServer] = {}
        for _ in range(REPLICAS):
            server = opened.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replica))
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a health check that is cut off
            servers[str(server.server_port)] = server
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened.callback(server.shutdown)
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        lines = []
        for line in (KUBERNETES / "haproxy.cfg").read_text().splitlines():
            if line.strip().startswith("server-template"):  # no name resolves to several of this machine's ports
                lines += [f"    server replica{at} 127.0.0.1:{name}" for at, name in enumerate(servers, start=1)]
            else:
                lines.append(line.replace("bind :8080", f"bind 127.0.0.1:{port}"))
        file = tmp_path / "haproxy.cfg"
        file.write_text("\n".join([*lines, ""]))
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([haproxy, "-db", "-f", str(file)], stdout=log, stderr=log)
        opened.callback(process.wait)
        opened.callback(process.kill)
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 20
        while asked(address, "first") is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield address, servers


def asked(address: str, key: str) -> str | None:
    """Which server answers a key's request; None where none does."""
    request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            answer: bytes = response.read()
            return answer.decode()
    except (urllib.error.URLError, ConnectionError):
        return None


def test_the_balancers_configuration_is_valid() -> None:
    """HAProxy takes the file as it is."""
    command = [program("haproxy"), "-c", "-f", str(KUBERNETES / "haproxy.cfg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "REPLICAS": "localhost"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_tenant_stays_at_its_replica(balanced: tuple[str, dict[str, http.server.ThreadingHTTPServer]]) -> None:
    """Requests of one key go to one replica, keys spread over all, and when a replica goes only its keys go elsewhere."""
    address, servers = balanced
    keys = [f"cb-{number}" for number in range(30)]
    before = {key: asked(address, key) for key in keys}
    assert {key: asked(address, key) for key in keys} == before
    assert set(before.values()) == set(servers)
    gone = str(before[keys[0]])
    servers[gone].shutdown()
    servers[gone].server_close()
    deadline = time.monotonic() + 20
    while (after := {key: asked(address, key) for key in keys})[keys[0]] in (None, gone):
        assert time.monotonic() < deadline, "nobody took its keys over"
    assert {key for key in keys if after[key] != before[key]} == {key for key in keys if before[key] == gone}
