"""Metadata of documents, plain values by name, and filters over them: checked, and as conditions of SQL."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cacheblend.base.errors import InputError

Scalar = str | int | float | bool
Metadata = Mapping[str, Scalar | Sequence[Scalar]]
MAX_FIELDS, MAX_VALUES, MAX_BYTES = 64, 100, 4096  # of a document; values of a field; all as JSON
OPERATORS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_FIELD = re.compile(r'[^\x00-\x1f\x7f-\x9f\ud800-\udfff"\\]{1,64}')
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # half a character, and what ends a text for SQLite


def read_metadata(given: object) -> dict[str, Any]:
    """Check a document's metadata, text, numbers and true or false by name, or lists of them; null and [] are as if left out.

    Raises:
        InputError: it is nested or too much, or a name or a value is not allowed.
    """
    fields = _fields(given, "metadata").items()
    found = {name: value for name, value in fields if not (value is None or (isinstance(value, list | tuple) and not value))}
    for name, value in found.items():
        _check_values(name, value if isinstance(value, list | tuple) else [value])
    if (nbytes := len(as_json(found).encode())) > MAX_BYTES:
        raise InputError(f"metadata of {nbytes} bytes is more than {MAX_BYTES}; put what is long into the text")
    return found


def as_json(metadata: Metadata) -> str:
    """Metadata as one text, the same for the same values."""
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """Conditions that a document's metadata must meet, all of them; use `of`.

    Args:
        sql: over a row with the column `fields`.
        values: of the places that `sql` has for them.
    """

    sql: str
    values: tuple[str | int | float, ...]

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Read `{"lang": "de"}` (equal), `{"lang": ["de", "fr"]}` (one of), `{"year": {"gte": 2020, "lt": 2025}}`; None for {}.

        Of a field that is a list one value must meet its condition. A number is no text, and true is no number.

        Raises:
            InputError: an operator is not known, or a name or a value is not allowed.
        """
        conditions, values = list[str](), list[str | int | float]()
        for name, wanted in _fields(given, "filter").items():
            if isinstance(wanted, Mapping):
                if not wanted or (unknown := [operator for operator in wanted if operator not in OPERATORS]):
                    shown = f"{str(unknown[0])[:40]!r} is no operator" if wanted else "has no operator"
                    raise InputError(f"{name}: {shown}; give {', '.join(OPERATORS)}, a value, or a list of values")
                bounds = [(OPERATORS[operator], value) for operator, value in wanted.items()]
                joined = " AND "
            else:
                bounds = [("=", value) for value in (wanted if isinstance(wanted, list | tuple) else [wanted])]
                joined = " OR "
            _check_values(name, [value for _, value in bounds])
            values.append(f'$."{name}"')
            met = joined.join(_comparison(*one) for one in bounds)
            conditions.append(f"EXISTS (SELECT 1 FROM json_each(fields, ?) WHERE {met})")
            values += [value for _, value in bounds]
        return cls(" AND ".join(conditions), tuple(values)) if conditions else None


def _comparison(operator: str, value: Scalar) -> str:
    kinds = "'true', 'false'" if isinstance(value, bool) else "'text'" if isinstance(value, str) else "'integer', 'real'"
    return f"(type IN ({kinds}) AND value {operator} ?)"


def _fields(given: object, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or len(given) > MAX_FIELDS:
        raise InputError(f'{what} must be an object of at most {MAX_FIELDS} fields, such as {{"year": 2024}}')
    for name in given:
        if not isinstance(name, str) or not _FIELD.fullmatch(name):
            raise InputError(f"{what}: {str(name)[:70]!a} is no name of a field: 1 to 64 characters, no quotes or backslashes")
    return given


def _check_values(name: str, values: Sequence[object]) -> None:
    if not 0 < len(values) <= MAX_VALUES:
        raise InputError(f"{name}: has {len(values)} values; give 1 to {MAX_VALUES}")
    for value in values:
        is_number = isinstance(value, int | float) and -(2**63) < value < 2**63  # NaN is neither
        if not is_number and not (isinstance(value, str) and not _NO_TEXT.search(value)):
            raise InputError(f"{name}: {str(value)[:40]!a} is no plain value; give text, a number, true, false, or a list")
