"""The rules of this repository as functions over source text: imports, lengths of functions, docstrings, tiers.

Packages are the folders of the import law (`engine`'s leaves count as one). Every checker takes text and returns
complaints, one line each, so that the tests can hand it a planted fault as easily as the repository.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "engine", "cluster", "deploy", "dashboards")
_LEAF_NAMES = ("adapters", "adapter_commands", "adapter_slots",
               "architectures", "config", "checkpoint", "kv_events", "weight_formats", "geometry",
               "vision_geometry", "audio_geometry", "media_geometry", "memory", "logit_adjustments", "protocol", "plan",
               "rank_status", "channel", "lifeline", "matcher", "pieces", "step_masks", "media_memory", "step_shapes",
               "quantisation", "events", "errors", "attention")  # fmt: skip
LEAVES = frozenset(f"engine.{name}" for name in _LEAF_NAMES)
CONTROL = frozenset(
    {"engine.core", "engine.front", "cluster", "deploy", "deploy.edge", "deploy.models", "deploy.cli", "dashboards"}
)
TIERS = frozenset({"pure", "cpu", "serve", "artefacts", "nodes", "gpu", "gpu4"})
_MARK = re.compile(r"\bmark\.(\w+)")

_LEAVES = tuple(sorted(LEAVES))
_OURS = frozenset({*PACKAGES, "tests", "training"})
_LAZY = frozenset({"torch", "transformers"})
# Distributions that one package alone may import.
_ONLY_IN = {"ray": "deploy", "fastapi": "deploy.edge", "starlette": "deploy.edge"}
_KERNELS_MAY = frozenset({"torch", "triton", "flashinfer"}) | sys.stdlib_module_names

# deploy/ has three packages and a handful of files beside them, the only ones that import ray.
_DEPLOY_PACKAGES = ("deploy.edge", "deploy.models")
_DEPLOY_FILES = tuple(f"deploy.{path.stem}" for path in sorted((ROOT / "deploy").glob("*.py")) if path.stem != "__init__")

# What of ours each package may import, besides itself; where one lies inside another, the inner one comes first.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "engine.leaf": _LEAVES,
    "engine.core": _LEAVES,
    "engine.front": _LEAVES,
    "engine.rank": (*_LEAVES, "kernels"),
    "cluster": (*_LEAVES, "engine.core", "engine.front", "engine.rank"),
    "deploy.edge": (*_LEAVES, "engine.front"),
    "deploy.models": (*_LEAVES, "engine.front"),
    "deploy.cli": (*_LEAVES, "engine.front", "engine.rank", "kernels", "cluster", "dashboards", *_DEPLOY_FILES, *_DEPLOY_PACKAGES),
    "deploy": (*_LEAVES, "engine.front", "cluster", "dashboards", "deploy.edge", "deploy.models", *_DEPLOY_FILES),
    "dashboards": ("engine.events", "engine.errors"),
}


@dataclass(frozen=True)
class Import:
    """One import: its dotted target (`from a.b import c`: `a.b.c`), its line, whether importing the module runs it."""

    target: str
    line: int
    at_import: bool

    def within(self, package: str) -> bool:
        """Whether the target is `package`, or lies in it."""
        return self.target == package or self.target.startswith(package + ".")

    @property
    def top(self) -> str:
        """The distribution-level name: what stands before the first dot."""
        return self.target.partition(".")[0]


def sources() -> list[Path]:
    """Every Python file of the import packages, sorted."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """`<root>/engine/core/loop.py` -> `engine.core.loop`; a package's `__init__.py` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str | None:
    """The package of the import law that `module` lies in, or None. `engine` itself counts as a leaf."""
    if module == "engine" or any(module == leaf or module.startswith(leaf + ".") for leaf in LEAVES):
        return "engine.leaf"
    packages = (package for package in MAY_IMPORT if module == package or module.startswith(package + "."))
    return next(packages, None)


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of `source`, at any depth; relative ones resolved, `import_module("x")` of a literal counted."""
    package = module if is_package else module.rpartition(".")[0]
    yield from _walk(ast.parse(source), package, at_import=True)


def _walk(node: ast.AST, package: str, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        yield from (Import(target, child.lineno, at_import) for target in _targets(child, package))
        runs = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from (found for part in child.body for found in _walk(ast.Module([part], []), package, at_import=False))
            yield from (found for part in child.orelse for found in _walk(ast.Module([part], []), package, at_import=runs))
        else:
            yield from _walk(child, package, at_import=runs)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _targets(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=name, names=names, level=level):
            base = _absolute(name or "", level, package)
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(args=[ast.Constant(value=str(name)), *_], func=func):
            return [name] if ast.unparse(func) in {"__import__", "import_module", "importlib.import_module"} else []
    return []


def _absolute(name: str, level: int, package: str) -> str:
    if level == 0:
        return name
    parts = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*parts, name] if name else parts)


def law_complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Each breach of the import law in `source`, as `module:line: why`."""
    package = package_of(module)
    if package is None:
        return [f"{module}:1: lies in no package of the import law; engine's leaves are {', '.join(_LEAVES)}"]
    found = imports(source, module, is_package=is_package)
    return [f"{module}:{item.line}: {why}" for item in found if (why := _breach(item, package))]


def _breach(item: Import, package: str) -> str | None:
    if item.top in _OURS:
        return None if _may_import_ours(item, package) else f"{package} may not import {item.target}"
    if package == "kernels" and item.top not in _KERNELS_MAY:
        return f"kernels imports torch, triton and flashinfer only, not {item.target}"
    if package != (only := _ONLY_IN.get(item.top, package)):
        return f"only {only} imports {item.top}"
    if item.top in _LAZY and package == "engine.leaf":
        return f"a leaf may not import {item.top} at all"
    if item.top in _LAZY and package in CONTROL and item.at_import:
        return f"{package} may not import {item.top} at module level"
    return None


def _may_import_ours(item: Import, package: str) -> bool:
    own = [package] if package not in ("engine.leaf", "deploy") else []
    return any(item.within(allowed) for allowed in (*MAY_IMPORT[package], *own))


def knots(modules: dict[str, str], package: str) -> list[tuple[str, ...]]:
    """Rooms of `package`, its folders and its single files, that import each other round about; `modules`: name -> source."""
    reached = _imported_rooms(modules, package)
    for middle, behind in reached.items():
        for others in reached.values():
            if middle in others:
                others.update(behind)
    return sorted({tuple(sorted(other for other in reached[room] if room in reached.get(other, ()))) for room in reached} - {()})


def floors(modules: dict[str, str], package: str) -> int:
    """Rooms on the longest chain of imports inside `package`, which has no knots; `modules`: name -> source."""
    below = _imported_rooms(modules, package)

    def height(room: str) -> int:
        return 1 + max(map(height, below[room]), default=0)

    return max(map(height, below))


def _imported_rooms(modules: dict[str, str], package: str) -> dict[str, set[str]]:
    """The other rooms that each room imports."""
    imported = {}
    for module, source in modules.items():
        room = _room(module, package)
        targets = {_room(item.target, package) for item in imports(source, module) if item.within(package)}
        imported.setdefault(room, set()).update(targets - {room})
    return imported


def _room(module: str, package: str) -> str:
    return module.removeprefix(package).lstrip(".").partition(".")[0]


@dataclass(frozen=True)
class Function:
    """A function's qualified name, first line and number of lines, from `def` to its last."""

    name: str
    line: int
    lines: int


def functions(source: str) -> list[Function]:
    """Every function of `source`, nested ones and methods included."""
    return list(_functions(ast.parse(source), ""))


def _functions(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(prefix + child.name, child.lineno, (child.end_lineno or child.lineno) - child.lineno + 1)
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(child, f"{prefix}{child.name}." if named else prefix)


def long_functions(source: str, ceiling: int) -> list[str]:
    """Functions of more than `ceiling` lines, as `line: name has n lines`."""
    return [f"{item.line}: {item.name} has {item.lines} lines" for item in functions(source) if item.lines > ceiling]


def untyped_functions(source: str) -> list[str]:
    """Functions that lack a type of an argument or of what they return, as `line: name`; compiled ones need that of no tensor."""
    return [f"{node.lineno}: {node.name}" for node in ast.walk(ast.parse(source)) if _untyped(node)]


def _untyped(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any("jit" in ast.unparse(x) for x in node.decorator_list):
        return False
    arguments = [arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg) and arg.arg not in {"self", "cls"}]
    return node.returns is None or any(arg.annotation is None for arg in arguments)


def docstring_complaints(source: str) -> list[str]:
    """A module with anything in it starts by saying what it is."""
    tree = ast.parse(source)
    return ["1: no module docstring"] if tree.body and not ast.get_docstring(tree) else []


_CHANGELOG_LINE = re.compile(
    r"|# Changelog|Entries follow .*|## \[(Unreleased|\d+\.\d+\.\d+)\].*|### (Added|Changed|Fixed)"
    r"|\*\*[\w ]+\*\*|\* .*|\[[\w.]+\]: \S+"
)


def changelog_complaints(text: str, longest: int) -> list[str]:
    """Lines that are no heading, link or entry of one line, and entries longer than `longest` characters."""
    return [
        f"{number}: {line[:60]}"
        for number, line in enumerate(text.splitlines(), 1)
        if not _CHANGELOG_LINE.fullmatch(line) or (line.startswith("* ") and len(line) > longest)
    ]


def tier_complaints(source: str) -> list[str]:
    """A test file names exactly one tier in a module-level `pytestmark`."""
    marks = {name for node in ast.parse(source).body for name in _pytestmark(node)}
    tiers = sorted(marks & TIERS)
    return [] if len(tiers) == 1 else [f"1: pytestmark must name one tier of {sorted(TIERS)}, not {tiers}"]


def _pytestmark(node: ast.stmt) -> set[str]:
    match node:
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
            return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(value)))
    return set()


def may_match(source: str, expression: str) -> bool:
    """Whether pytest's `-m expression` may select a test of this file: all have the marks of `pytestmark`, any may have others."""
    asked = set(re.findall(r"\w+", expression))
    certain = set(_MARK.findall("".join(re.findall(r"^pytestmark = .*$", source, re.MULTILINE))))
    possible = sorted((set(_MARK.findall(source)) - certain) & asked)
    subsets = (certain.union(some) for count in range(len(possible) + 1) for some in combinations(possible, count))
    compiled = Expression.compile(expression)
    return any(compiled.evaluate(lambda name, marks=marks, **_: name in marks) for marks in subsets)


def repeated(names: Iterable[tuple[str, str]]) -> list[str]:
    """`name stands in a, b` for each of the (name, place) pairs whose name stands in several places."""
    places = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return [f"{name} stands in {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def class_names(source: str) -> list[str]:
    """The classes of a module, private ones and those inside others apart."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
