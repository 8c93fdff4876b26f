"""The data sets, where their files are looked for, and how to get them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cacheblend.base.errors import ConfigError, InputError

from .case_file import SCHEMA
from .wording import DIALOGUE, NEWS, SHORT_ANSWER, Wording

DATA_VARIABLE = "CACHEBLEND_DATA"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One data set.

    Args:
        file: its file's name.
        source: where the original comes from.
        cases: cases of the paper's run, or of the file.
        wording: the words of its prompts.
        new_tokens: most tokens of an answer.
        searched: passages are split into chunks and searched; else every passage is a chunk, and all are used.
        split: passages are split into chunks, though not searched.
        prompt_tokens: longest prompt; None for the model's own limit.
    """

    file: str
    source: str
    cases: int
    wording: Wording = SHORT_ANSWER
    new_tokens: int = 32
    searched: bool = True
    split: bool = True
    prompt_tokens: int | None = None


_MUSIQUE = "https://github.com/StonyBrookNLP/musique"
_2WIKI = "https://github.com/Alab-NII/2wikimultihop"
_LONGBENCH = "https://huggingface.co/datasets/THUDM/LongBench"

DATA_SETS = {
    "musique": DataSet(file="musique_cacheblend150.jsonl", source="https://github.com/YaoJiayi/CacheBlend", cases=150),
    "musique_dev": DataSet(file="musique_dev.jsonl", source=_MUSIQUE, cases=146),
    "2wikimqa": DataSet(file="2wikimqa_longbench100.jsonl", source=f"{_LONGBENCH} (2wikimqa)", cases=200),
    "2wikimqa_dev": DataSet(file="2wikimqa_dev.jsonl", source=_2WIKI, cases=328),
    "2wikimqa_shared": DataSet(file="2wikimqa_sharedcorpus1000.jsonl.gz", source=_2WIKI, cases=1000),
    "hotpotqa": DataSet(file="hotpotqa_dev.jsonl", source="https://hotpotqa.github.io", cases=100),
    "squad_shared": DataSet(
        file="squad11_dev_rag1000.jsonl.gz", source="https://rajpurkar.github.io/SQuAD-explorer", cases=1000
    ),
    "samsum": DataSet(
        file="samsum_fewshot200.jsonl.gz",
        source=f"{_LONGBENCH} (samsum)",
        cases=200,
        wording=DIALOGUE,
        new_tokens=64,
        searched=False,
        split=False,
        prompt_tokens=3400,
    ),
    "multinews": DataSet(
        file="multi_news_60.jsonl",
        source=f"{_LONGBENCH} (multi_news)",
        cases=60,
        wording=NEWS,
        new_tokens=256,
        searched=False,
    ),
}


def data_set(name: str) -> DataSet:
    """The data set of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DATA_SETS:
        raise ConfigError("data set", name, f"one of world, {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def find_file(name: str, place: str | None) -> Path:
    """The file of a data set.

    Args:
        name: of the data set.
        place: its file, a folder that has it, or the id ("owner/name") of a data set on the hub that has it; None takes the
            environment's `CACHEBLEND_DATA`.

    Raises:
        ConfigError: an unknown data set.
        InputError: it is not there; the message says how to get it.
    """
    wanted = data_set(name)
    place = place or os.environ.get(DATA_VARIABLE) or None
    if place is not None:
        path = Path(place).expanduser()
        if path.is_dir():
            path = path / wanted.file
        if path.is_file():
            return path
        if not path.exists() and place.count("/") == 1 and not place.startswith((".", "/", "~")):
            return _from_hub(wanted.file, place)
    looked = "no place was given" if place is None else f"not at {place}"
    raise InputError(
        f"the data set {name} is not here ({looked}): get it from {wanted.source}, write one JSON object a line, {SCHEMA}, "
        f"to {wanted.file}, and give the file or its folder with --data or {DATA_VARIABLE}"
    )


def _from_hub(file: str, repository: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = str(error).strip().split("\n")[0]
        raise InputError(f"{file} cannot be had from the hub's data set {repository!r}: {cause}") from error
