"""Counts what makes prose and code hard to read, room by room: `python -m tests.support.prose` prints the figures.

An allowance is the count that is there. It is lowered when a room is rewritten, and never raised.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repo_rules import ROOT, sources

BANNED = ("behind", "beside", "is none")
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
MEASURES = (*BANNED, "docstring words", "tuple assignments", "conditional expressions")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# In the order of MEASURES.
ALLOWED: dict[str, tuple[int, ...]] = {
    "engine/core": (22, 17, 1, 6683, 54, 64),
    "engine/rank": (43, 10, 5, 11723, 119, 112),
    "engine/front": (18, 7, 5, 4907, 38, 115),
    "engine": (29, 14, 3, 8107, 19, 63),
    "kernels": (90, 8, 1, 12930, 228, 117),
    "cluster": (4, 1, 0, 1619, 2, 20),
    "deploy/edge": (9, 13, 12, 10032, 26, 160),
    "deploy": (5, 6, 8, 4146, 6, 64),
    "dashboards": (3, 2, 0, 1160, 6, 14),
    "docs": (16, 30, 1, 0, 0, 0),
}


def room_of(path: Path) -> str:
    """The first room of ROOMS that holds a file."""
    name = path.relative_to(ROOT).as_posix()
    return next(room for room in ROOMS if name.startswith(f"{room}/"))


def figures() -> dict[str, Counter[str]]:
    """Each room's count of each measure."""
    found = {room: Counter[str]() for room in ROOMS}
    for path in sources():
        found[room_of(path)] += counted(path.read_text())
    for path in _pages():
        found[room_of(path)] += banned(path.read_text())
    return found


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
