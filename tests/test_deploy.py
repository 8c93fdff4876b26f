"""What is shipped to deploy with: its files are well-formed, closed by default, and name what there is."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cacheblend.base.errors import ConfigError
from cacheblend.cli import main as cli
from cacheblend.service.http import metrics
from cacheblend.service.http.config import HttpConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_is_closed() -> None:
    """A service has a read-only root and no capabilities, is reached from this machine alone, and mounts what there is."""
    assert set(COMPOSE["services"]) == {"cacheblend", "prometheus", "grafana"}
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    assert ":?" in COMPOSE["services"]["cacheblend"]["environment"]["CACHEBLEND_API_KEY"], "no key, no start"
    targets = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["cacheblend:8000"]


def test_container() -> None:
    """The image's user is no root and has a number, the health check is in exec form, and no key is baked in."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    last = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert next(line for line in last if line.startswith("USER ")) == "USER 10001"
    check = next(line for line in last if line.startswith("HEALTHCHECK "))
    assert json.loads(check.partition("CMD ")[2])[0] == "python"
    variables = dict(pair.split("=", 1) for pair in shlex.split(next(line for line in last if line.startswith("ENV "))[4:]))
    assert (variables["CACHEBLEND_HOST"], variables["CACHEBLEND_REQUIRE_KEY"]) == ("0.0.0.0", "1")
    assert "API_KEY" not in " ".join(variables.values())
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert all((DEPLOY.parent / line[1:]).exists() for line in ignored if line.startswith("!"))


def test_the_image_has_what_a_deployment_asks_for() -> None:
    """The image has the server, the remote tiers, and a compiler for the CPU's attention."""
    text = (DEPLOY / "Containerfile").read_text()
    [found] = re.findall(r'install .*"\.\[([a-z,]+)\]"', text)
    extras = set(found.split(","))
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert {"server", "redis", "objects"} <= extras <= set(project["optional-dependencies"])
    assert re.search(r"apt-get install .*\bgcc\b", text.partition("COPY --from=build")[0].rpartition("FROM ")[2])


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """Every metric in a panel or an alert is one that the service exports, and panels use the provisioned data source."""
    dashboard = json.loads((DEPLOY / "grafana" / "cacheblend.json").read_text())
    source = Path(metrics.__file__).read_text()
    names = set(re.findall(r'"(cacheblend_[a-z_]+)"', source)) | {
        f"cacheblend_store_{name}" for name in (*metrics.TIER_METRICS, *metrics.STORE_COUNTERS)
    }
    names |= {f"cacheblend_remote_{name}" for name in metrics.REMOTE_COUNTERS}
    names.add("cacheblend_guard_agreement")
    uid = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"][0]["uid"]
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == uid
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + [rule["expr"] for rule in alerts]
    for name in re.findall(r"cacheblend_[a-z_]+", " ".join(asked)):
        assert name in names or re.sub(r"_(total|bucket|sum|count)$", "", name) in names, name


@pytest.mark.parametrize("file", ["Caddyfile", "nginx.conf"])
def test_proxies_agree_with_the_defaults(file: str) -> None:
    """A proxy passes the largest upload, keeps connections for less time than the service, and hides the metrics."""
    text, http = (DEPLOY / file).read_text(), HttpConfig()
    [megabytes] = re.findall(r"(?:max_size|client_max_body_size) (\d+)(?:MiB|m)", text)
    [seconds] = re.findall(r"keepalive(?:_timeout)? (\d+)s", text)
    assert (int(megabytes) * 2**20, int(seconds) < http.keep_alive_s) == (http.max_body_bytes, True)
    assert re.search(r"/metrics .*404", text)
    assert f"127.0.0.1:{http.port}" in text


def test_a_key_is_required() -> None:
    """As in the container: beyond this machine there is no start without a key."""
    arguments = ["serve", "-m", "m", "--host", "0.0.0.0", "--require-key"]
    with pytest.raises(ConfigError, match="CACHEBLEND_API_KEY"):
        CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
