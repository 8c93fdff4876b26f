"""The real data sets, where they are at hand: every line is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cacheblend.base.errors import InputError
from cacheblend.eval.data import DATA_SETS, find_file, read_examples

DATA = Path(os.environ.get("CACHEBLEND_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_every_line_is_an_example(name: str) -> None:
    """Each file is read to its end, ids are unique, and there are as many cases as the set says, or half of them."""
    try:
        file = find_file(name, str(DATA))
    except InputError as error:
        pytest.skip(f"{error}")
    examples = list(read_examples(file))
    assert len({example.id for example in examples}) == len(examples)
    assert DATA_SETS[name].cases / 2 <= len(examples) <= DATA_SETS[name].cases
