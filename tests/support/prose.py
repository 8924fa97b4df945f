"""Counts what makes prose and code hard to read, room by room: `python -m tests.support.prose` prints the figures.

An allowance is what is there: a count of each banned word, and the other measures per 1 000 lines of code, so that new code in
plain words is free. It is lowered when a room is rewritten, and never raised.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repo_rules import ROOT, sources
from tests.support.sizes import ROOMS, code_size, room_of

BANNED = ("behind", "beside", "is none", "whoever", "says nothing", "what is there", "as many as")
RATES = ("docstring words", "tuple assignments", "conditional expressions")
MEASURES = (*BANNED, *RATES)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# In the order of MEASURES; those of RATES per 1 000 lines.
ALLOWED: dict[str, tuple[int, ...]] = {
    "engine/core": (0, 0, 0, 0, 0, 0, 0, 1543, 21, 26),
    "engine/rank": (0, 0, 0, 0, 0, 0, 0, 1650, 28, 27),
    "engine/front": (0, 0, 0, 0, 0, 0, 0, 1227, 15, 48),
    "engine": (0, 0, 0, 0, 0, 0, 0, 1828, 8, 28),
    "kernels": (0, 0, 0, 0, 0, 0, 0, 1829, 49, 27),
    "cluster": (0, 0, 0, 0, 0, 0, 0, 1451, 4, 35),
    "deploy/edge": (0, 0, 0, 0, 0, 0, 0, 1116, 4, 32),
    "deploy": (0, 0, 0, 0, 0, 0, 0, 1055, 3, 32),
    "dashboards": (0, 0, 0, 0, 0, 0, 0, 852, 4, 19),
    "docs": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
}


def figures() -> dict[str, Counter[str]]:
    """Each room's count of each banned word, and its measures of RATES per 1 000 lines, rounded up."""
    found = {room: Counter[str]() for room in ROOMS}
    lines = Counter[str]()
    for path in sources():
        source = path.read_text()
        found[room_of(path)] += counted(source)
        lines[room_of(path)] += code_size(source).lines
    for room in lines:
        for measure in RATES:
            found[room][measure] = per_thousand(found[room][measure], lines[room])
    for path in _pages():
        found[room_of(path)] += banned(path.read_text())
    return found


def per_thousand(count: int, lines: int) -> int:
    """A count per 1 000 lines, rounded up."""
    return -(-1000 * count // lines)


def _pages() -> Iterator[Path]:
    """The pages in Markdown of all rooms, without those that tests generate."""
    for room in {name.partition("/")[0] for name in ROOMS}:
        yield from sorted(path for path in (ROOT / room).rglob("*.md") if path.name not in ("settings.md", "METRICS.md"))


def banned(text: str) -> Counter[str]:
    """How often each banned word stands in a text, also with a capital and over line ends; `is None` of code is not one."""
    words = " ".join(text.split())
    return Counter({word: len(re.findall(rf"\b(?:{word}|{word.capitalize()})\b", words)) for word in BANNED})


def counted(source: str) -> Counter[str]:
    """The measures of a module's source; banned words count in code, comments and docstrings."""
    found = banned(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            found["docstring words"] += len((ast.get_docstring(node) or "").split())
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
        elif isinstance(node, ast.IfExp):
            found["conditional expressions"] += 1
    return found


def breaches(found: dict[str, Counter[str]]) -> list[str]:
    """A line for each count above its allowance."""
    rows = ((room, measure, found[room][measure], ALLOWED[room][at]) for room in ROOMS for at, measure in enumerate(MEASURES))
    return [f"{room}: {count} {measure}, allowed {allowed}" for room, measure, count, allowed in rows if count > allowed]


def main() -> None:
    """The table of figures in the form of ALLOWED."""
    for room, counts in figures().items():
        print(f'    "{room}": ({", ".join(str(counts[measure]) for measure in MEASURES)}),')


if __name__ == "__main__":
    main()
