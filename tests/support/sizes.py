"""Prints how long functions and files are and how much code there is: `python -m tests.support.sizes`; exits with 1 above a bound.

Kernels are counted apart: one launch is one function. Code is lines and tokens without comments and docstrings.
"""

import ast
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.repo_rules import ROOT, functions, sources

FILE_CEILING = 500
ROOMS = (
    "engine/core",
    "engine/rank",
    "engine/front",
    "engine",
    "kernels",
    "cluster",
    "deploy/edge",
    "deploy",
    "dashboards",
    "docs",
)
# Tokens of each room: what is there and 1 % of slack. Who comes below lowers the bound; who needs more says what the new
# feature replaced. The goal of the product for the same features: 215 000 tokens, of them 90 000 of the engine.
BOUNDS = {
    "engine/core": 22_720,
    "engine/rank": 58_866,
    "engine/front": 25_201,
    "engine": 25_258,
    "kernels": 74_751,
    "cluster": 5_711,
    "deploy/edge": 57_860,
    "deploy": 24_237,
    "dashboards": 5_792,
    "tests": 634_467,
}
CONSTRUCTOR = 250  # tokens of the largest
_COUNTED = frozenset({tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class CodeSize:
    """Lines that hold a token, and tokens: operators, names, numbers and strings, docstrings apart (tinygrad's measure). An
    f-string is one token, as Python 3.11 reads it; 3.12 reads its parts."""

    lines: int
    tokens: int


def code_size(source: str) -> CodeSize:
    """The size of a module's source."""
    documented = (node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED))
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node, clean=False) is not None]
    skipped = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    read = _without_parts(tokenize.generate_tokens(io.StringIO(source).readline))
    tokens = [token for token in read if token.type in _COUNTED and token.start[0] not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return CodeSize(len(lines), len(tokens))


def constructors(source: str) -> dict[int, int]:
    """Tokens of each `__init__`, by its line."""
    found = [item for item in functions(source) if item.name.rpartition(".")[2] == "__init__"]
    lines = source.splitlines()
    texts = {item.line: "\n".join(lines[item.line - 1 :][: item.lines]) for item in found}
    return {line: code_size(textwrap.dedent(text)).tokens for line, text in texts.items()}


def _without_parts(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens, an f-string's as one."""
    begun = []
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token)
        elif kind == "FSTRING_END":
            begun.pop()
            if not begun:
                yield token._replace(type=tokenize.STRING)
        elif not begun:
            yield token


def room_of(path: Path) -> str:
    """The first room of ROOMS that holds a file."""
    name = path.relative_to(ROOT).as_posix()
    return next(room for room in ROOMS if name.startswith(f"{room}/"))


def code_sizes() -> dict[str, int]:
    """The tokens of each room of BOUNDS."""
    sizes = dict.fromkeys(BOUNDS, 0)
    for path in sources():
        sizes[room_of(path)] += code_size(path.read_text()).tokens
    sizes["tests"] = sum(code_size(path.read_text()).tokens for path in _tests())
    return sizes


def _tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def excesses(figures: dict[str, int]) -> list[str]:
    """A line for each room above its bound."""
    return [f"{room}: {figures[room]} tokens, bound {bound}" for room, bound in BOUNDS.items() if figures[room] > bound]


def main() -> int:
    """One line a group of packages, every file above the ceiling, then the size of the product's code."""
    tests = _tests()
    kernels = [path for path in sources() if path.relative_to(ROOT).parts[0] == "kernels"]
    for label, paths in (
        ("outside kernels", [path for path in sources() if path not in kernels]),
        ("kernels", kernels),
        ("tests", tests),
    ):
        print(_line(label, paths))
    for path in (*sources(), *tests):
        if (count := _length(path)) > FILE_CEILING:
            print(f"  {path.relative_to(ROOT)}: {count} lines, ceiling {FILE_CEILING}")
    figures = code_sizes()
    for room, tokens in figures.items():
        print(f"{room}: {tokens} tokens, bound {BOUNDS[room]}")
    for line in excesses(figures):
        print(f"too much code: {line}", file=sys.stderr)
    return 1 if excesses(figures) else 0


def _line(label: str, paths: list[Path]) -> str:
    sizes = sorted(item.lines for path in paths for item in functions(path.read_text()))
    if not sizes:
        return f"{label}: no functions"
    median, p90 = sizes[len(sizes) // 2], sizes[len(sizes) * 9 // 10]
    lines = sum(_length(path) for path in paths)
    count = f"{len(paths)} files, {lines} lines, {len(sizes)} functions"
    return f"{label}: {count} of median {median}, p90 {p90}, max {sizes[-1]} lines"


def _length(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
