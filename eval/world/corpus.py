"""A world as documents: what a retriever indexes and `cacheblend demo` ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .article import Style, write_article
from .case import GROUP_SIZE, CaseConfig, document_id
from .names import Kind, Split
from .world import World, make_world


def documents(world: World, style: Style | None = None) -> Iterator[dict[str, object]]:
    """Every article of a world as `{"id", "title", "text", "chunks"}`; `text` is its chunks put together."""
    style = style or Style()
    for groups in world.groups.values():
        for group in groups:
            for entity in group.entities:
                article = write_article(world, group, entity, style)
                yield {
                    "id": document_id(entity.name),
                    "title": entity.name,
                    "text": article.text,
                    "chunks": list(article.chunks),
                }


def write_corpus(path: Path, seed: int, articles: int = 210) -> int:
    """Writes a corpus of at least `articles` test-split articles as JSONL; returns how many.

    Raises:
        FileExistsError: the file exists.
    """
    per_round = len(Kind) * GROUP_SIZE
    world = make_world(str(seed), Split.TEST, -(-articles // per_round), GROUP_SIZE)
    lines = [json.dumps(document, ensure_ascii=False) for document in documents(world, CaseConfig().style)]
    with path.open("x", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return len(lines)
