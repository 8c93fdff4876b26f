"""Words of code and documents: the glossary's, sentences with a subject, and names that exist."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("base", "blend", "store", "loader", "retriever", "service", "integrations", "cacheblend")
OTHERS = ("eval", "scripts", "examples", "deploy", "docs", "tests")
BANNED = re.compile(
    r"\b(told|kept|alone|behind|gives|takes|(?<!at )most(?! likely)|away|rest|whole|once more|sooner)\b", re.IGNORECASE
)
# Uses left in names and docstrings of the product, and docstrings left that begin vaguely. Both numbers only fall.
LIMIT = 50
VAGUE_LIMIT = 8
VAGUE = re.compile(r"(The same|See|What)\b|(?s:.*)\n\s*\w+: so\.")
# Options, and names in dotted, snake or camel case.
NAMED = re.compile(r"(?<!`)`(--[a-z][a-z-]+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|\w+_\w+|[A-Z][a-z]+[A-Z]\w+)(?:\(\))?`(?!`)")
# Of other projects, placeholders, and metrics whose names are put together.
FOREIGN = re.compile(
    r"VLLM_|LMCACHE_|vllm\.|cacheblend_(guard|vllm)_|--gpu-memory-utilization"
    r"|(extra_body|OpenAI(Embeddings|ChatCompletionsModel)|Cache\.update|blend_NAME|[kv]_HND|importlib\.\S+|AbstractEventLoop|(Chat)?PromptBuilder)$"
)
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees(*folders: str) -> dict[Path, ast.Module]:
    """The syntax trees of the Python files below some folders."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in found}


def docstring(node: ast.AST) -> ast.Constant | None:
    """The docstring of a definition or a module, or of a field above it, as its node."""
    first = node.body[0] if isinstance(node, Definition) and node.body else None
    found = first.value if isinstance(first, ast.Expr) else None
    return found if isinstance(found, ast.Constant) and isinstance(found.value, str) else None


def words_of(node: ast.AST) -> Iterator[str]:
    """What a node names and documents, a name's parts as words."""
    if text := docstring(node):
        yield str(text.value)
    is_new = isinstance(node, Definition | ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
    for field in ("name", "arg", "id", "attr"):
        if is_new and isinstance(name := getattr(node, field, None), str):
            yield re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", name)


@functools.cache
def vocabulary() -> frozenset[str]:
    """Names of the repository's files, and every name and text in quotes of its code, docstrings apart."""
    paths = [*ROOT.glob("*"), *(path for folder in (*PRODUCT, *OTHERS) for path in (ROOT / folder).rglob("*"))]
    words = {part for path in paths for part in (path.name, path.stem)}
    for tree in trees(*PRODUCT, "eval", "scripts").values():
        docs = {id(text) for node in ast.walk(tree) if (text := docstring(node))}
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name", "module"):
                words.update(str(getattr(node, field, "")).split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                words.update(re.findall(r"[\w.-]+|\w+", node.value))
    return frozenset(words)


def unknown(text: str) -> set[str]:
    """The names in a text's backticks that stand nowhere in the code."""

    def is_known(name: str) -> bool:
        option = re.sub("^(--|CACHEBLEND_)", "", name).replace("-", "_").lower()
        return {name, option} & vocabulary() != set() or all(part in vocabulary() for part in name.split("."))

    return {name for name in NAMED.findall(text) if not FOREIGN.match(name) and not is_known(name)}


def documented() -> Iterator[tuple[str, str]]:
    """Place and text of every docstring of the product."""
    for path, tree in trees(*PRODUCT).items():
        for node in ast.walk(tree):
            if text := docstring(node):
                yield f"{path.relative_to(ROOT)}:{text.lineno}", str(text.value)


def test_banned_words() -> None:
    """Names and docstrings of the product have few of the words that the glossary replaces."""
    nodes = (node for tree in trees(*PRODUCT).values() for node in ast.walk(tree))
    assert sum(len(BANNED.findall(text)) for node in nodes for text in words_of(node)) <= LIMIT


def test_docstrings_have_a_subject() -> None:
    """Hardly a docstring begins with "The same", "See" or "What", or says of an error that something is "so"."""
    vague = [place for place, text in documented() if VAGUE.match(text)]
    assert len(vague) <= VAGUE_LIMIT, vague


def test_names_exist() -> None:
    """Every name in the backticks of a docstring or a page is one of the code."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [*documented(), *((page.name, page.read_text(encoding="utf-8")) for page in pages)]
    assert not {place: names for place, text in texts if (names := unknown(text))}
