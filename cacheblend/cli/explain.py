"""`cacheblend explain`: what a request's prompt has that is taken for a passage, and why."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend.base.errors import InputError
from cacheblend.retriever import passages
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

        cacheblend explain request.json --store-dir my-store
    """
    from cacheblend.retriever.index import IndexedDocuments
    from cacheblend.service.engine.passages import passages_of

    messages = _messages(request)
    with ExitStack() as opened:
        find: Callable[[str, str], list[passages.Passage]] = passages.find_passages
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
    plain = f"a paragraph that nothing marks {passages.PARAGRAPH_CHARACTERS} and {passages.PARAGRAPH_SENTENCES} sentences"
    terminal.note(f"a passage has at least {passages.LEAST_CHARACTERS} characters, {plain}; the assistant's texts have none")


def _messages(file: Path) -> list[tuple[str, str]]:
    """The roles and texts of a request's messages; a completion's prompt is a user's.

    Raises:
        InputError: the file is no request.
    """
    try:
        body = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}; give a request's body") from error
    match body:
        case {"prompt": str() as prompt}:
            return [("user", prompt)]
        case {"messages": [*turns]} if all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
            return [(turn["role"], _text(turn.get("content"))) for turn in turns]
    raise InputError(f'{file} is no request; give an object with "messages", each with a "role", or with a "prompt", a text')


def _text(content: Any) -> str:
    """The text of a message, or of its parts; empty where it has none, as one that calls tools."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
