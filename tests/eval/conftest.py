"""A tiny random model, in memory and in a folder; a data set of a few cases; an embedder."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeEmbedder

from cacheblend.blend import Fusor
from cacheblend.cli import main as cli
from cacheblend.eval.data import FileSource, Preset

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below
sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
from engines import make_model
from example_files import case, write

POSITIONS = 1536


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with sharpened attention; its configuration does not say that it is random, so that answers are marked."""
    folder = tmp_path_factory.mktemp("eval-model")
    make_model(folder, POSITIONS, hidden_size=32, intermediate_size=48, eos_token_id=None)
    return folder


@pytest.fixture(scope="session")
def fusor(model_dir: Path) -> Fusor:
    return Fusor.from_pretrained(str(model_dir))


@pytest.fixture(scope="session")
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileSource:
    """Five cases over two documents each, of several chunks."""
    folder = tmp_path_factory.mktemp("data")
    write(folder, "musique", [case(index) for index in range(5)])
    return FileSource(name="musique", data=str(folder), cases=5, preset=Preset(chunk_tokens=64, num_chunks=4))


@pytest.fixture
def cacheblend(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedder: FakeEmbedder
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process and the test's folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    for variable in ("CACHEBLEND_MODEL", "CACHEBLEND_DATA"):
        monkeypatch.delenv(variable, raising=False)
    for source in ("file_source", "documents_source"):
        monkeypatch.setattr(f"cacheblend.eval.data.{source}.SentenceTransformerEmbedder", lambda: embedder)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder of two documents of several chunks."""
    folder = tmp_path / "handbook"
    folder.mkdir()
    travel = "".join(f"Travel abroad is signed off by the head of unit {unit}. " for unit in range(25))
    (folder / "travel.md").write_text(f"# Travel\n\n{travel}")
    (folder / "rooms.txt").write_text("".join(f"Room {room} is booked at the front desk before noon. " for room in range(25)))
    return folder
