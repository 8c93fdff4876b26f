"""Examples from JSON lines, plain or gzipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.service.engine.document_sources import read_json_lines

from .example import Example, Passage, Task

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
        raise InputError(f"{path} cannot be read: {error}; give a whole UTF-8 file") from error


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
