"""The service's file, flags and variables: the same names, and a clear error for each that is wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.cli import main as cli
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key
from cacheblend.service.http.guard import ApiKeys
from cacheblend.service.serving.scheduler import ServingConfig
from cacheblend.store import StoreConfig

DIGEST = hash_key("cb-key")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `cacheblend serve` would have served with."""
    seen: list[Any] = []

    class Recorder:
        def __init__(self, *arguments: Any) -> None:
            seen.extend(arguments)

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None: ...

        def warm_up(self) -> None: ...

    monkeypatch.setattr("cacheblend.service.http.server.Server", Recorder)
    monkeypatch.setattr("cacheblend.service.http.app.run", lambda *_: None)
    monkeypatch.setattr("cacheblend.cli.serve.bind", lambda *_: socket.socket())
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)
    return seen


def test_file_flag_and_variable(served: list[Any], tmp_path: Path) -> None:
    """A flag wins over a variable, that over the file, and that over the default."""
    file = tmp_path / "c.toml"
    file.write_text(
        f'model = "m"\nmax_num_seqs = 3\nport = 1\nhost = "::1"\ncors_origins = ["https://a.example"]\n'
        'prefix_budget_bytes = "1.5 GiB"\nnvme_budget_bytes = 5\nselector = "gradual"\n'
        f'[tenants.acme]\napi_key_sha256 = "{DIGEST}"\n'
    )
    result = CliRunner().invoke(
        cli.app,
        ["serve", "--config", str(file), "--port", "3", "--nvme-budget-bytes", "6GB", "--preset", "fast"],
        env={"CACHEBLEND_PORT": "2", "CACHEBLEND_HOST": "127.0.0.2"},
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    engine, serving, http, tenants = served
    assert engine.model == "m"
    sizes = engine.prefix_budget_bytes, engine.store.nvme_budget_bytes, engine.store.ram_budget_bytes
    assert sizes == (3 * 2**29, 6 * 10**9, StoreConfig().ram_budget_bytes)
    assert (engine.fusion.selector, engine.recompute_ratio) == ("gradual", 0.05)
    assert serving == ServingConfig(max_num_seqs=3)
    assert http == HttpConfig(host="127.0.0.2", port=3, cors_origins=("https://a.example",))
    assert tenants == [TenantConfig(name="acme", api_key_sha256=(DIGEST,))]


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("max_num_seq = 3", ConfigError, r"may set max_num_seqs[^.]{,60}, and"),
        ("max_num_seqs = ", InputError, "not TOML"),
        ("max_num_seqs = 0", ConfigError, "at least 1"),
        ("deadline_s = 0", ConfigError, "above 0"),
        ("guard_share = 1.5", ConfigError, "from 0 to 1"),
        ('preset = "quick"', ConfigError, "exact, high, balanced, fast"),
        ("port = 70000", ConfigError, "65535"),
        ('cors_origins = ["example.org"]', ConfigError, "https://example.org"),
        ('cors_origins = ["https://a.example,https://b.example"]', ConfigError, "parted by spaces"),
        ('cors_origins = ["https://a.example/"]', ConfigError, "https://example.org"),
        ("[tenants.acme]", ConfigError, "api-key"),
        ('[tenants.acme]\napi_key_sha256 = "x"', ConfigError, "64 hex digits"),
        (f'[tenants."../x"]\napi_key_sha256 = "{DIGEST}"', ConfigError, "lower-case"),
        (f'[tenants.acme]\napi_key_sha256 = "{DIGEST}"\nquota = 7', ConfigError, "quota"),
        (f'[tenants.acme]\napi_key_sha256 = "{DIGEST}"\nnvme_budget_bytes = 1', ConfigError, "nvme_budget_bytes"),
        ("prefix_budget_bytes = 0", ConfigError, "prefix_budget_bytes=0"),
        ('allowed_hosts = ["https://a.example"]', ConfigError, "without a port"),
        ("[tenants]", ConfigError, "opens the API to everybody"),
        ("tenants = 1", ConfigError, "table for each"),
        ("[tenants]\nacme = 1", ConfigError, "tenants.acme='int'"),
        ("[tenants.acme]\napi_key_sha256 = 1", ConfigError, "64 hex digits"),
        ("[tenants.acme]\napi_key_sha256 = [1]", ConfigError, "64 hex digits"),
    ],
)
@pytest.mark.usefixtures("served")
def test_bad_files(tmp_path: Path, text: str, error: type[Exception], named: str) -> None:
    """A file with a wrong name or value is refused, with what is allowed."""
    file = tmp_path / "c.toml"
    file.write_text(f"{text}\n" if text.startswith("[") else f'model = "m"\n{text}\n')
    with pytest.raises(error, match=named):
        CliRunner().invoke(cli.app, ["serve", "-m", "m", "--config", str(file)], catch_exceptions=False)


@pytest.mark.parametrize(
    "text",
    [
        "[tenants.a]\napi_key = 'K'",
        "[tenants.a]\napi_key_sha256 = 'K'",
        "api_keys = 'K'",
        "api_key = 'K'\n[tenants.a]\napi_key_sha256 = 'K'",
    ],
)
@pytest.mark.usefixtures("served")
def test_a_key_in_the_wrong_place_is_not_shown(tmp_path: Path, text: str) -> None:
    """What may be a key itself is in no error message, which a log keeps."""
    file = tmp_path / "c.toml"
    file.write_text(text.replace("'K'", '"cb-secret"'))
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(cli.app, ["serve", "-m", "m", "--config", str(file)], catch_exceptions=False)
    assert "cb-secret" not in str(refused.value)


def test_the_file_of_deploy(served: list[Any]) -> None:
    """The file that is shipped is right."""
    file = Path(__file__).parents[3] / "deploy" / "cacheblend.toml"
    assert CliRunner().invoke(cli.app, ["serve", "-m", "m", "--config", str(file)], catch_exceptions=False).exit_code == 0
    assert served[2].port == 8000


@pytest.mark.usefixtures("served")
def test_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable for the key that is empty opens no service."""
    monkeypatch.setenv("CACHEBLEND_API_KEY", "")
    with pytest.raises(ConfigError, match="open the API to everybody"):
        CliRunner().invoke(cli.app, ["serve", "-m", "m"], catch_exceptions=False)


def test_api_key() -> None:
    """A key that is made is found by its hash."""
    made = json.loads(CliRunner().invoke(cli.app, ["api-key", "--json"]).stdout)
    keys = ApiKeys([TenantConfig(name="acme", api_key_sha256=(made["api_key_sha256"],))])
    assert [keys.tenant(given) for given in (f"Bearer {made['key']}", "Bearer other", None)] == ["acme", None, None]
    assert ApiKeys([]).tenant(None) == ""
