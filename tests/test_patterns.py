"""Regular expressions read a text once, whatever is in it: all of the product's, those that come later too."""

import ast
import importlib
import re
import string
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import cacheblend

ROOT = Path(cacheblend.__file__).resolve().parents[1]
FLOORS = ("base", "blend", "store", "loader", "retriever", "service", "cacheblend")
CHARACTERS = 5_000
NOTED_S, BOUND_S = 0.005, 0.02  # of CPU time, of such a text and of two; one that is read once takes 1 ms


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Each pattern of a module, in a name, in a list or in a call, with its file."""
    for file in chain.from_iterable((ROOT / floor).rglob("*.py") for floor in FLOORS):
        name, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        if not re.search(r"^import re$", source, re.MULTILINE):
            continue
        module = importlib.import_module(f"cacheblend.{name.removeprefix('cacheblend/')[:-3].replace('/', '.')}")
        for value in vars(module).values():
            yield from ((name, one) for one in (value if isinstance(value, list) else [value]) if isinstance(one, re.Pattern))
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "re":
                try:
                    made = eval(ast.unparse(call.args[0]), vars(module))
                except NameError:  # of a function's own names: in a list above, or of texts that are escaped
                    continue
                if isinstance(made, str):
                    yield name, re.compile(made)


def slow_text(pattern: re.Pattern[str]) -> str | None:
    """What a pattern reads again and again when it is repeated: a character, or a part of the pattern's own text."""
    source = pattern.pattern
    heads = {"---\n---", *re.findall("[a-z]{4,}", source)}
    parts = {source[at : at + size] for size in (1, 2, 6) for at in range(len(source))}
    for part in sorted(parts.union(string.printable, "\u3002\u2026\u0301", ("\n ", "a ", "! ", "\\"))):
        for head in heads.union([""]) if part in " \t" else [""]:
            if _seconds(pattern, head, part, CHARACTERS) > NOTED_S and all(
                _seconds(pattern, head, part, 2 * CHARACTERS) > BOUND_S
                for _ in range(5)  # the processor may be taken away for a while
            ):
                return head + part
    return None


def _seconds(pattern: re.Pattern[str], head: str, part: str, characters: int) -> float:
    text, began = head + part * (characters // len(part)) + "\0x", time.thread_time()
    for _ in pattern.finditer(text):
        pass
    pattern.fullmatch(text)
    return time.thread_time() - began


def test_every_pattern_reads_a_run_once() -> None:
    """No run of a character, or of a part of the pattern, is read more than once: 20 kB have frozen a service."""
    found = {(file, pattern.pattern): pattern for file, pattern in patterns() if isinstance(pattern.pattern, str)}
    assert len(found) > 20
    assert {key: slow for key, pattern in found.items() if (slow := slow_text(pattern)) is not None} == {}


def test_what_is_slow_is_found() -> None:
    """A pattern that looks from each mark of a run for what follows the run is found."""
    assert slow_text(re.compile(r"[.!?]+(?=\s)")) in (".", "!", "?", ".!")
