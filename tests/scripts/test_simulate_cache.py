"""The simulated store has the hits of a real one."""

from __future__ import annotations

import pytest
import simulate_cache


def test_as_a_real_store(capsys: pytest.CaptureFixture[str]) -> None:
    """A real store that is asked for the same chunks has exactly the hits of the simulation, in RAM and on disk."""
    figures = simulate_cache.main(["--check", "--chunks", "60", "--lookups", "300"])
    assert capsys.readouterr().out.count("\n") == len(simulate_cache.EXPONENTS) + 1
    for run in figures["runs"]:
        assert run["simulated"] == run["real"]
        assert min(run["real"].values()) > 0


def test_hits_grow_with_the_disk() -> None:
    """A larger disk has more hits, and none more than one that holds the most popular chunks from the start."""
    corpus = simulate_cache.Corpus(chunks=400, lookups=6000, per_request=6, seed=1)
    found = [corpus.run(simulate_cache.SimulatedStore(1000, share * 1000), 0.9).share for share in (20, 80, 320)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    for share, held in zip(found, (20, 80, 320), strict=True):
        assert share <= simulate_cache.best_hits(400, 0.9, held) + 0.02


def test_second_hit_filter() -> None:
    """With the filter RAM has more of the hits than where it copies whatever is read."""
    corpus = simulate_cache.Corpus(chunks=2000, lookups=20_000, per_request=6, seed=1)
    filtered, plain = (
        corpus.run(simulate_cache.SimulatedStore(40_000, 1_000_000, admits_all=admits_all), 0.9).ram_share
        for admits_all in (False, True)
    )
    assert filtered > plain
