"""The bench of all tables."""

from __future__ import annotations

from script_modules import load_script


def test_every_table_has_its_place_on_the_page() -> None:
    """The page of benchmarks has a beginning and an end for each table, in this order."""
    bench = load_script("bench_all")
    page = bench.PAGE.read_text(encoding="utf-8")
    for name in bench.TABLES:
        begin, end = page.find(f"<!-- bench:{name} -->\n"), page.find(f"<!-- /bench:{name} -->")
        assert 0 <= begin < end, name
        assert hasattr(bench.Bench, name)
