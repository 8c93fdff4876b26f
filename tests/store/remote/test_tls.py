"""The remote tier over TLS: entries come from a Redis whose certificate is trusted, and from no other."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks import make_chunk, same
from remote_servers import SECRET, OpenShared, RedisServer, remote_of

KEY, KV = make_chunk(1)


def has_tls() -> bool:
    """Whether the `redis-server` at hand was built with TLS; such a one asks for the key that is left out."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        return False
    tried = subprocess.run(
        [server, "--port", "0", "--tls-port", "1", "--save", ""], capture_output=True, text=True, check=False, timeout=60
    )
    return "tls-cert-file" in tried.stdout


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost, signed by itself; its key is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed, which makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", path.with_suffix(".key"), "-out", path], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def tls_url(certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis that speaks TLS on a port of the loopback; whom to trust is not in the URL."""
    if not has_tls():
        pytest.skip("no redis-server with TLS is installed: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(certificate.with_suffix(".key"))]
    server = RedisServer(
        tmp_path_factory.mktemp("r"), "--tls-port", str(port), *files, "--tls-auth-clients", "no", "--bind", "127.0.0.1"
    )
    yield f"rediss://localhost:{port}/0"
    server.kill()


def test_entries_come_over_tls(tls_url: str, certificate: Path, open_shared: OpenShared) -> None:
    """What one replica writes over TLS another reads, where the server's certificate is one that both trust."""
    url = f"{tls_url}?ssl_ca_certs={certificate}"
    one = open_shared("a", url, remote_secret=SECRET)
    one.put(KEY, KV)
    assert one.flush_remote(30)
    other = open_shared("b", url, remote_secret=SECRET, remote_timeout_s=30.0)
    assert same(other.get(KEY), KV)
    assert "pem" not in str(remote_of(other).address)


def test_an_unknown_certificate_is_not_trusted(tls_url: str, certificate: Path, open_shared: OpenShared) -> None:
    """A server whose certificate nobody vouches for, or that has another name, is asked for nothing and told nothing."""
    for name, url in (("unknown", tls_url), ("another", tls_url.replace("localhost", "127.0.0.1"))):
        trusted = f"?ssl_ca_certs={certificate}" if name == "another" else ""
        store = open_shared(name, url + trusted)
        store.put(KEY, KV)
        assert not store.flush_remote(0.5)
        stats = remote_of(store).stats()
        assert (stats.sent, stats.pending_writes) == (0, 1)
        assert remote_of(store).open_all(["0" * 64]) == {}
        assert remote_of(store).stats().failures == 1
