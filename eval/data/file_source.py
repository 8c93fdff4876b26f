"""A data set's file as requests: split, searched, cut."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import (
    Chunk,
    Document,
    Embedder,
    PlainTokenizer,
    Retriever,
    RetrieverConfig,
    SentenceTransformerEmbedder,
)
from cacheblend.retriever.config import SEPARATOR
from cacheblend.service.engine.document_sources import read_json_lines

from .caching_embedder import CachingEmbedder
from .request import Example, Passage, Request, Task, arrange, make_request
from .source import DIALOGUE, NEWS, SEARCHED_CHUNKS, SHORT_ANSWER, Preset, Wording, prompt_renderer

SCHEMA = '{"id", "question", "answers": [..], "passages": [{"title", "text"}, ..], "task": "qa" | "summarization"}'


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of a file, line by line.

    Args:
        path: a .jsonl or .jsonl.gz file; a line is `SCHEMA`.

    Raises:
        InputError: a line that is not JSON or no example, named by file and line; a file that cannot be read.
    """
    try:
        for where, value in read_json_lines(path):
            yield _example(value, where)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}; give a complete UTF-8 file") from error


def _example(raw: Any, where: str) -> Example:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: not an example {SCHEMA}")
    passages, answers = raw.get("passages"), raw.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f'{where}: "answers" must be a list of at least one text')
    if not isinstance(passages, list) or not passages:
        raise InputError(f'{where}: "passages" must be a list of at least one {{"title", "text"}}')
    if raw.get("task") not in list(Task):
        raise InputError(f'{where}: "task" must be one of {", ".join(Task)}, not {raw.get("task")!r}')
    task, question = Task(raw["task"]), raw.get("question")
    if not isinstance(question, str) or (task is Task.QA and not question.strip()):
        raise InputError(f'{where}: "question" must be a text')
    identifier = raw.get("id")
    if not isinstance(identifier, str) or not identifier:
        raise InputError(f'{where}: "id" must be a text')
    return Example(identifier, question, tuple(answers), tuple(_passage(passage, where) for passage in passages), task)


def _passage(raw: Any, where: str) -> Passage:
    title, text = (raw.get("title") or "", raw.get("text")) if isinstance(raw, dict) else ("", None)
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise InputError(f'{where}: a passage must be {{"title", "text"}} with a text that is not empty')
    return Passage(title, text)


DATA_VARIABLE = "CACHEBLEND_DATA"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One data set.

    Args:
        file: its file's name.
        source: where the original comes from.
        cases: cases of the paper's run, or of the file.
        wording: the words of its prompts.
        new_tokens: upper bound on the tokens of an answer.
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
        file="multi_news_60.jsonl", source=f"{_LONGBENCH} (multi_news)", cases=60, wording=NEWS, new_tokens=256, searched=False
    ),
}


def data_set(name: str) -> DataSet:
    """The data set of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DATA_SETS:
        raise ConfigError("data set", name, f"one of {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def find_file(name: str, place: str | None) -> Path:
    """The file of a data set.

    Args:
        name: of the data set.
        place: its file, a folder that has it, or the id ("owner/name") of a data set on the hub that has it; None is the
            environment's `CACHEBLEND_DATA`.

    Raises:
        ConfigError: an unknown data set.
        InputError: it is not there; the message says how to get it.
    """
    wanted = data_set(name)
    place = place or os.environ.get(DATA_VARIABLE) or None
    if place is not None:
        path = Path(place).expanduser()
        if path.is_dir():  # a file with the number of its cases in the name, or packed, is the same set
            path = min(path.glob(f"{wanted.file.partition('.')[0]}*.jsonl*"), default=path / wanted.file)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Cases of a data set's file.

    Args:
        name: of the data set.
        data: see `find_file`.
        cases: how many, from the file's start; None for as many as the paper took.
        seed: of the order, where the preset shuffles.
        preset: chunks, retrieval, order, prompt and caching.

    Raises:
        ConfigError: an unknown data set, or fewer than one case.
    """

    name: str
    data: str | None = None
    cases: int | None = None
    seed: int = 0
    preset: Preset = field(default_factory=Preset)

    def __post_init__(self) -> None:
        if self.cases is not None and self.cases < 1:
            raise ConfigError("cases", self.cases, "at least 1")
        if self.preset.shared_corpus and not self._set.searched:
            raise ConfigError("preset", "extended", f"{self.name} is not searched, so its cases share no corpus; use paper")

    @property
    def _set(self) -> DataSet:
        return data_set(self.name)

    @property
    def wording(self) -> Wording:
        """The words around passages and questions."""
        return replace(self._set.wording, prompt=self.preset.prompt)

    @property
    def new_tokens(self) -> int:
        """Upper bound on the tokens of an answer."""
        return self._set.new_tokens

    @property
    def count(self) -> int:
        """Upper bound on the number of requests; the file may hold fewer."""
        return self.cases or self._set.cases

    @property
    def caches_all(self) -> bool:
        """Whether each chunk of a request is cached before it comes."""
        return not self.preset.shared_corpus

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """Yield the requests, see `RequestSource`; the file is read to its end before the first request.

        Raises:
            InputError: the file is not there, or a line of it is no example.
        """
        limits = [tokens for tokens in (limit, self._set.prompt_tokens) if tokens is not None]
        path = find_file(self.name, self.data)
        examples = list(itertools.islice(read_examples(path), self.count))  # a broken line ends the run here, not hours later
        if len({example.task for example in examples}) > 1:
            raise InputError(f"{path} mixes tasks, which have different metrics; give a file for each")
        warm_up = int(self.preset.warm_up * len(examples))
        renderer, plain = prompt_renderer(tokenizer, self.wording), PlainTokenizer(tokenizer)
        config = RetrieverConfig(chunk_tokens=self.preset.chunk_tokens)
        with Retriever(config, tokenizer, embedder or CachingEmbedder(SentenceTransformerEmbedder())) as retriever:
            if self.preset.shared_corpus:
                random.Random(self.seed).shuffle(examples)
                retriever.add((document for example in examples for document in _documents(example)), on_corpus)
            for index, example in enumerate(examples):
                question = self.wording.question.format(question=example.question)
                chunks = self._chunks(example, retriever, plain)
                request = make_request(
                    example,
                    renderer.prefix,
                    [chunk.token_ids for chunk in chunks],
                    renderer.question(question).suffix,
                    min(limits, default=None),
                    document_ids=[chunk.document_id for chunk in chunks],
                    documents=[chunk.earlier for chunk in chunks],
                    is_warm_up=index < warm_up,
                )
                yield arrange(request, self.preset.order, tokenizer.decode)

    def _chunks(self, example: Example, retriever: Retriever, plain: PlainTokenizer) -> list[_Chunk]:
        """A case's chunks, in the prompt's order."""
        documents, num_chunks = _documents(example), self.preset.num_chunks
        if (self.preset.chunking or ("split" if self._set.split else "passage")) == "passage":
            return [_Chunk(document.id, plain.ids(document.content + SEPARATOR)) for document in documents[:num_chunks]]
        if not self._set.searched:
            split = ((document.id, retriever.splitter.split(document)) for document in documents)
            every = (_Chunk.of(chunk, chunks) for _, chunks in split for chunk in chunks)
            return list(itertools.islice(every, num_chunks))
        if not self.preset.shared_corpus:
            retriever.add(documents)
        found = retriever.search(example.question, min(num_chunks or SEARCHED_CHUNKS, retriever.chunk_count))
        chunks = [_Chunk.of(scored.chunk, retriever.chunks(scored.chunk.document_id)) for scored in found]
        if not self.preset.shared_corpus:
            for document in retriever.documents():
                retriever.delete(document.id)
        return chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk's document and token ids, and those of the document's chunks before it."""

    document_id: str
    token_ids: Sequence[int]
    earlier: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, chunk: Chunk, document: Sequence[Chunk]) -> _Chunk:
        """A chunk of a document, given all of the document's."""
        earlier = [other.token_ids for other in document if other.position < chunk.position]
        return cls(chunk.document_id, chunk.token_ids, earlier)


def _documents(example: Example) -> list[Document]:
    return [Document.of({"title": passage.title, "text": passage.text}) for passage in example.passages]
