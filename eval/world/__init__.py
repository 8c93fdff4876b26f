"""The fictional world: an encyclopedia of people, firms, towns, clubs, films and works, and questions about it.

`make_cases` gives the test, `documents` and `write_corpus` what a retriever indexes, `guessing_levels` what a guesser gets.
`scripts/train_reader` teaches the reader with it.
"""

from .case import Case, CaseChunk, CaseConfig, documents, guessing_levels, make_cases, world_of, write_corpus
from .names import Split
from .question import WORKING_ENDS, QuestionClass, prompt_of
from .world import World, make_world

__all__ = [
    "WORKING_ENDS",
    "Case",
    "CaseChunk",
    "CaseConfig",
    "QuestionClass",
    "Split",
    "World",
    "documents",
    "guessing_levels",
    "make_cases",
    "make_world",
    "prompt_of",
    "world_of",
    "write_corpus",
]
