"""Questions made from the documents themselves, for those who bring none: what KL and equal tokens are measured on.

They have no right answer. They are plain, and alike; what matters is that each is about one place of the documents, as a user's
question is, so that retrieval and the model's attention have something to find.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from cacheblend.retriever import Chunk

from .example import Example, Task

QUESTION = "What does the text say about {topic}?"
TOPIC_WORDS = 12
SEED = 0
_HEADING = re.compile(r"^#+\s+(\S.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s")


def chunk_questions(chunks: Sequence[Chunk], cases: int | None) -> list[Example]:
    """A question about each chunk of a sample, the same for the same chunks; in random order.

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
    """What a text is about: its first heading (Markdown), or else the first words of its first sentence."""
    heading = _HEADING.search(text)
    line = heading[1] if heading else _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    return " ".join(line.split()[:TOPIC_WORDS]).strip(" .,:;!?#*|")
