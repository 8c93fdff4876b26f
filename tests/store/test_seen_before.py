"""What comes a second time, before too much else came, is told from what comes once."""

from cacheblend.store.eviction import AdmissionFilter


def test_the_second_time() -> None:
    """A name is new at first, known afterwards, and each time it comes it counts as the last."""
    seen = AdmissionFilter(2)
    assert [seen.admits(name) for name in "aabacab"] == [False, True, False, True, False, True, False]


def test_weights() -> None:
    """What is remembered weighs no more than was said, a name counts with its last weight, and one too heavy is forgotten."""
    seen = AdmissionFilter(10)
    assert [seen.admits(*one) for one in (("a", 6), ("b", 4), ("a", 7), ("b", 3), ("a", 7), ("big", 11), ("a", 1))] == [
        *(False, False, True, False, True),
        *(False, False),
    ]
