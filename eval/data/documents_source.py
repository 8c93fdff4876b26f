"""A user's own documents and questions as requests."""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import (
    Chunk,
    Document,
    Embedder,
    Retriever,
    RetrieverConfig,
    SentenceTransformerEmbedder,
    in_reading_order,
)
from cacheblend.service.engine.document_sources import SourceReport, file_documents, parse_json, source_files
from cacheblend.service.engine.file_converter import FileConverter

from .caching_embedder import CachingEmbedder
from .request import Example, Request, Task, arrange, make_request
from .source import OWN_QUESTION, SEARCHED_CHUNKS, Preset, Wording, prompt_renderer

QUESTION = "What does the text say about {topic}?"
TOPIC_WORDS = 12
SEED = 0
_HEADING = re.compile(r"^#+\s+(\S.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s")


def chunk_questions(chunks: Sequence[Chunk], cases: int | None) -> list[Example]:
    """Make a question about each chunk of a sample, in random order; deterministic for given chunks.

    Args:
        chunks: of all documents.
        cases: how many; None, and more than there are, for all.
    """
    sample = random.Random(SEED).sample(list(chunks), len(chunks) if cases is None else min(cases, len(chunks)))
    return [
        Example(f"{chunk.document_id}#{chunk.position}", QUESTION.format(topic=topic(chunk.text)), (), (), Task.QA)
        for chunk in sample
    ]


def topic(text: str) -> str:
    """Name the topic of a text: its first Markdown heading, or the first words of its first sentence."""
    heading = _HEADING.search(text)
    line = heading[1] if heading else _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    return " ".join(line.split()[:TOPIC_WORDS]).strip(" .,:;!?#*|")


QUESTION_SCHEMA = '{"question", "answers": [..] and "id" if there are any}'


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsSource:
    """Questions over the files of a folder, as the service would answer them: chunks searched in one corpus, all cached.

    Args:
        documents: a folder, a file or a pattern, see `DocumentStream`.
        questions: a .jsonl file, a line `QUESTION_SCHEMA`, or a .txt file, a line a question; None makes them from the
            documents, see `chunk_questions`.
        cases: how many questions, from the file's start; None for all.
        preset: chunks, retrieval, order and prompt.
        worked_examples: a plain text begins with worked examples, for base models; without them it is the service's own.

    Raises:
        ConfigError: fewer than one case, or a preset for the cases of a data set.
    """

    documents: str
    questions: str | None
    cases: int | None = None
    preset: Preset = field(default_factory=Preset)
    worked_examples: bool = True

    def __post_init__(self) -> None:
        if self.cases is not None and self.cases < 1:
            raise ConfigError("cases", self.cases, "at least 1")
        if self.preset.chunking == "passage" or self.preset.shared_corpus or self.preset.warm_up:
            raise ConfigError("preset", self.preset, "chunks that are split, searched and all cached, for a user's documents")

    @property
    def name(self) -> str:
        """Name of the data set."""
        return "documents"

    @property
    def wording(self) -> Wording:
        """The service's own words."""
        examples = OWN_QUESTION.examples if self.worked_examples else ()
        return replace(OWN_QUESTION, prompt=self.preset.prompt, examples=examples)

    @property
    def new_tokens(self) -> int:
        """Upper bound on the tokens of an answer."""
        return 32

    @property
    def count(self) -> int:
        """Upper bound on the number of requests; 0, for as many as the file has, if `cases` is None."""
        return self.cases or 0

    @property
    def caches_all(self) -> bool:
        """Each chunk was ingested before."""
        return True

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """See `RequestSource.requests`; all questions of a file are read before the first document.

        Raises:
            InputError: a file is not there, a line of it is no question or document, or there is nothing in them.
        """
        file = None if self.questions is None else Path(self.questions)
        given = [] if file is None else list(itertools.islice(read_questions(file), self.cases))
        renderer = prompt_renderer(tokenizer, self.wording)
        config = RetrieverConfig(chunk_tokens=self.preset.chunk_tokens)
        with Retriever(config, tokenizer, embedder or CachingEmbedder(SentenceTransformerEmbedder())) as retriever:
            retriever.add(self._read(file), on_corpus)
            if not retriever.chunk_count:
                raise InputError(f"{self.documents} holds no document; give a folder with texts")
            examples = given if file is not None else chunk_questions(retriever.chunks(), self.cases)
            num_chunks = min(self.preset.num_chunks or SEARCHED_CHUNKS, retriever.chunk_count)
            for example in examples:
                found = [scored.chunk for scored in in_reading_order(retriever.search(example.question, num_chunks))]
                question = self.wording.question.format(question=example.question)
                request = make_request(
                    example,
                    renderer.prefix,
                    [chunk.token_ids for chunk in found],
                    renderer.question(question).suffix,
                    limit,
                    document_ids=[chunk.document_id for chunk in found],
                    documents=[_earlier(chunk, retriever.chunks(chunk.document_id)) for chunk in found],
                )
                yield arrange(request, self.preset.order, tokenizer.decode)

    def _read(self, questions: Path | None) -> Iterator[Document]:
        """The documents; the first file with a fault ends the reading, but files and pages without text are skipped."""
        report = SourceReport(strict=True)
        with closing(FileConverter()) as converter:
            for file, id_ in source_files(self.documents, report.skipped):
                if questions is None or file.resolve() != questions.resolve():
                    with report.noting(str(file), is_found=Path(self.documents) != file):
                        yield from file_documents(file, id_, converter, fault=report.note)
                        if report.faults:
                            raise InputError(next(iter(report.faults.values())))


def _earlier(chunk: Chunk, document: Sequence[Chunk]) -> list[tuple[int, ...]]:
    return [other.token_ids for other in document if other.position < chunk.position]


def read_questions(path: Path) -> Iterator[Example]:
    """The questions of a file, line by line; empty lines are skipped.

    Args:
        path: a .jsonl file, a line `QUESTION_SCHEMA`, or a .txt file, a line a question.

    Raises:
        InputError: a file of another kind, one that cannot be read, or a line that is no question, named by file and line.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise InputError(f"{path} is no file of questions; give a .jsonl or a .txt file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; give a UTF-8 file with a question a line") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _question(line, path, number) if path.suffix == ".jsonl" else _example(line.strip(), (), str(number))


def _question(line: str, path: Path, number: int) -> Example:
    where = f"{path}, line {number}"
    raw = parse_json(line, where)
    if not isinstance(raw, dict):
        raise InputError(f"{where}: not a question {QUESTION_SCHEMA}")
    question, answers, identifier = raw.get("question"), raw.get("answers"), raw.get("id")
    if not isinstance(question, str) or not question.strip():
        raise InputError(f'{where}: "question" must be a text that is not empty')
    answers = [] if answers is None else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise InputError(f'{where}: "answers" must be a list of texts; leave it out where the right answer is not known')
    if identifier is not None and (not isinstance(identifier, str) or not identifier):
        raise InputError(f'{where}: "id" must be a text')
    return _example(question, tuple(answers), identifier or str(number))


def _example(question: str, answers: tuple[str, ...], identifier: str) -> Example:
    return Example(identifier, question, answers, (), Task.QA)
