"""`cacheblend explain`: what a request's prompt has that is taken for a passage, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.base.errors import InputError
from cacheblend.retriever.passages import Passage, find_passages
from cacheblend.service.engine.config import INDEX_FOLDER

from . import options, terminal

SHOWN = 60  # characters of each end of a passage


def explain(
    request: Annotated[Path, typer.Argument(help="A JSON file: the body of a chat or a text completion.")],
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    *,
    as_json: options.Json = False,
) -> None:
    """Show which passages are found in a request's messages, and why; no model is loaded.

    Examples:

        cacheblend explain request.json --store-dir store
    """
    from cacheblend.retriever.index import IndexedDocuments
    from cacheblend.service.engine.passages import passages_of

    messages = _messages(request)
    with ExitStack() as opened:
        find: Callable[[str, str], list[Passage]] = find_passages
        if (store_dir / INDEX_FOLDER).is_dir():
            find = opened.enter_context(IndexedDocuments.open(store_dir / INDEX_FOLDER)).passages
        found = [one.as_dict() for one in passages_of(messages, find)]
    if as_json:
        terminal.print_json({"characters": sum(len(text) for _, text in messages), "passages": found})
        return
    for shown in found:
        text, of = " ".join(shown["text"].split()), f" of {shown['document_id']}" if shown["document_id"] else ""
        role = messages[shown["message"]][0]
        place = f"message {shown['message']} ({role}), characters {shown['start']} to {shown['end']}"
        terminal.print_line(f"{place}: {shown['reason']}{of}\n    {text[:SHOWN]} ... {text[-SHOWN:]}")
    terminal.print_line(f"{terminal.counted(len(found), 'passage')} in {terminal.counted(len(messages), 'message')}")


def _messages(file: Path) -> list[tuple[str, str]]:
    """The roles and texts of a request's messages; a completion's prompt is a user's.

    Raises:
        InputError: the file is no request.
    """
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(body.get("prompt"), str):
            return [("user", body["prompt"])]
        contents = [(str(each["role"]), each.get("content") or "") for each in body["messages"]]
        return [(role, text if isinstance(text, str) else "".join(part["text"] for part in text)) for role, text in contents]
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f'{file} is no request ({error!r}); give JSON with "messages", or with a "prompt"') from error
