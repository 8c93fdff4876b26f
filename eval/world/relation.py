"""What can be said about an entity: one relation, its wordings as statement, question and description."""

from __future__ import annotations

from dataclasses import dataclass

from .names import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation between a subject of one kind and a value.

    `{S}` stands for the subject, `{P}` for its possessive, `{O}` for the value. A value is the name of an entity of kind
    `target` (another article's subject), or one of `values`.

    Attributes:
        statements: wordings of the fact as a sentence.
        questions: wordings that ask for the value.
        reverse: wordings that ask for the subject.
        descriptions: noun phrases that stand for the value without naming it, for questions of two hops.
        most, least: wordings that ask which of `{A}` and `{B}` has the greater or the smaller value; numbers only.
    """

    key: str
    kind: Kind
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reverse: tuple[str, ...]
    target: Kind | None = None
    values: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    least: tuple[str, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether two values can be compared."""
        return bool(self.most)
