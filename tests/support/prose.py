"""Counts what makes prose and code hard to read, room by room: `python -m tests.support.prose` prints the figures.

Banned words have counts; rates are per 1 000 lines, so that new code costs nothing if it is no worse. A room's docstrings have a
budget of words with 1 % of slack, and the product's documented functions a mean. A rewrite lowers them, and nothing raises them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repo_rules import ROOT, sources
from tests.support.sizes import ROOMS, code_size, room_of

BANNED = ("behind", "beside", "is none", "whoever", "says nothing", "what is there", "as many as")
RATES = ("tuple assignments", "conditional expressions")
MEASURES = (*BANNED, *RATES)
WORDS = "docstring words"
FUNCTIONS = "documented functions"
FUNCTION_WORDS = "words of functions"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTION)
# In the order of MEASURES; those of RATES per 1 000 lines.
ALLOWED: dict[str, tuple[int, ...]] = {
    "engine/core": (0, 0, 0, 0, 0, 0, 0, 4, 13),
    "engine/rank": (0, 0, 0, 0, 0, 0, 0, 3, 16),
    "engine/front": (0, 0, 0, 0, 0, 0, 0, 1, 28),
    "engine": (0, 0, 0, 0, 0, 0, 0, 2, 12),
    "kernels": (0, 0, 0, 0, 0, 0, 0, 8, 25),
    "cluster": (0, 0, 0, 0, 0, 0, 0, 0, 13),
    "deploy/edge": (0, 0, 0, 0, 0, 0, 0, 1, 16),
    "deploy": (0, 0, 0, 0, 0, 0, 0, 1, 18),
    "dashboards": (0, 0, 0, 0, 0, 0, 0, 0, 12),
    "docs": (0, 0, 0, 0, 0, 0, 0, 0, 0),
}
# Words of the docstrings of each room, with 1 % of slack.
BUDGETS = {
    "engine/core": 2_799,
    "engine/rank": 5_798,
    "engine/front": 2_586,
    "engine": 3_854,
    "kernels": 6_637,
    "cluster": 707,
    "deploy/edge": 5_256,
    "deploy": 2_081,
    "dashboards": 551,
    "docs": 0,
}
# The mean words of a documented function, over all rooms.
FUNCTION_MEAN = 13.7


def figures() -> dict[str, Counter[str]]:
    """Each room's count of each banned word, its measures of RATES per 1 000 lines, rounded up, and its words of docstrings."""
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
    """How often each banned word stands in a text, also in a name and over line ends; `is None` of code is not one."""
    words = " ".join(text.replace("_", " ").split())
    forms = {word: f"{word}|{word.capitalize()}|{word.upper()}" for word in BANNED}
    return Counter({word: len(re.findall(rf"\b(?:{form})\b", words)) for word, form in forms.items()})


def counted(source: str) -> Counter[str]:
    """The measures of a module's source; banned words count in code, comments and docstrings."""
    found = banned(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            words = len((ast.get_docstring(node) or "").split())
            found[WORDS] += words
            if isinstance(node, _FUNCTION):
                found[FUNCTIONS] += words > 0
                found[FUNCTION_WORDS] += words
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
        elif isinstance(node, ast.IfExp):
            found["conditional expressions"] += 1
    return found


def function_mean(found: dict[str, Counter[str]]) -> float:
    """The mean words of a documented function, over all rooms."""
    return sum(counts[FUNCTION_WORDS] for counts in found.values()) / sum(counts[FUNCTIONS] for counts in found.values())


def breaches(found: dict[str, Counter[str]]) -> list[str]:
    """A line for each count above its allowance or budget."""
    rows = [(room, measure, ALLOWED[room][at]) for room in ROOMS for at, measure in enumerate(MEASURES)]
    rows += [(room, WORDS, budget) for room, budget in BUDGETS.items()]
    return [
        f"{room}: {found[room][measure]} {measure}, allowed {allowed}"
        for room, measure, allowed in rows
        if found[room][measure] > allowed
    ]


def main() -> None:
    """The figures in the form of ALLOWED and, with 1 % of slack, of BUDGETS; then the mean."""
    found = figures()
    for room, counts in found.items():
        print(f'    "{room}": ({", ".join(str(counts[measure]) for measure in MEASURES)}),')
    for room, counts in found.items():
        print(f'    "{room}": {counts[WORDS] * 101 // 100:_},')
    print(f"words of a documented function: {function_mean(found):.2f}, at most {FUNCTION_MEAN}")


if __name__ == "__main__":
    main()
