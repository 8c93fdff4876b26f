"""The admission filter tells what comes a second time, before too much else came, from what comes once."""

from cacheblend.store.eviction import AdmissionFilter


def test_the_second_time() -> None:
    """A name is new at first, known afterwards, and each time it comes it counts as the last."""
    recent = AdmissionFilter(2)
    assert [recent.admits(name) for name in "aabacab"] == [False, True, False, True, False, True, False]


def test_weights() -> None:
    """What is remembered weighs no more than was said, a name counts with its last weight, and one too heavy is forgotten."""
    recent = AdmissionFilter(10)
    assert [recent.admits(*one) for one in (("a", 6), ("b", 4), ("a", 7), ("b", 3), ("a", 7), ("big", 11), ("a", 1))] == [
        *(False, False, True, False, True),
        *(False, False),
    ]
