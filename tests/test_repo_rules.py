"""The rules of this repository: what no tracked text may name, how long a function may be, and what every file starts with."""

import ast
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.drawn_faults import drawn
from tests.support.mutants import FAULTS
from tests.support.mutation import planted
from tests.support.repo_rules import (
    ROOT,
    changelog_complaints,
    class_names,
    docstring_complaints,
    functions,
    long_functions,
    may_match,
    module_name,
    repeated,
    sources,
    tier_complaints,
    untyped_functions,
)

pytestmark = pytest.mark.pure

FUNCTION_CEILING = 60
CORE_CEILING = 450
MESSAGE_CEILING = 20
ENTRY_CEILING = 200

# Folders that any text may name: they are the same on every machine.
COMMON = {
    Path(name)
    for name in (
        "/",
        "/bin",
        "/dev",
        "/etc",
        "/home",
        "/mnt",
        "/opt",
        "/proc",
        "/root",
        "/srv",
        "/sys",
        "/tmp",
        "/usr",
        "/var",
    )
}

# Not in the packages: the tests, and the training of the nano models.
TESTED = sorted(path for folder in ("tests", "training") for path in (ROOT / folder).rglob("*.py"))

# Modules whose name is not theirs alone yet.
STANDING = {"kernels.slots"}

FORBIDDEN = {
    "somebody's home folder": re.compile(r"(?<![\w.])/((home|Users)/[a-z][\w.-]*|root)/"),
    "an index option (pip's own settings say where packages come from)": re.compile(r"--(extra-)?index-url|--(find-links)"),
    "a registry's host": re.compile(r"\b(pypi|pythonhosted|npmjs|download\.pytorch)\.(org|com|io)\b"),
    "an issue by number alone (write repo#123)": re.compile(r"\bissue #?\d+\b", re.IGNORECASE),
}


def tracked() -> list[Path]:
    """Every text file that git tracks; in a copy without git, every file outside hidden folders and build products."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0") if done.returncode == 0 else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    paths = [ROOT / name for name in names if name and not {".venv", ".git", "__pycache__"} & set(Path(name).parts)]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def machine_paths(root: Path, home: Path) -> list[str]:
    """Absolute paths that say where a text was written: the checkout, what it lies in, the home folder."""
    common = COMMON | {Path(tempfile.gettempdir())}
    return [str(path) for path in (root, *root.parents, home) if path not in common]


def forbidden(text: str, paths: list[str]) -> list[str]:
    """`line: what it names` for each line of `text` that names something it may not."""
    named = {f"the machine path {path}": re.compile(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])") for path in paths}
    lines = enumerate(text.splitlines(), 1)
    return [
        f"{number}: names {what}"
        for number, line in lines
        for what, pattern in {**FORBIDDEN, **named}.items()
        if pattern.search(line)
    ]


def test_no_tracked_text_names_a_machine() -> None:
    """No tracked text names the machine it was written on, a registry host, or an issue without its repository."""
    paths = machine_paths(ROOT, Path.home())
    complaints = [
        f"{path.relative_to(ROOT)}:{line}" for path in tracked() for line in forbidden(path.read_text(errors="replace"), paths)
    ]
    assert not complaints, "\n".join(complaints[:MESSAGE_CEILING])


@pytest.mark.parametrize(
    "text",
    [
        "see /srv2/ada/quartet/engine",
        "cd /srv2/ada;",
        "PATH=/" + "home/ada/bin",
        "pip install " + "--extra-" + "index-url x",
        "https://" + "pypi" + ".org/simple",
        "as iss" + "ue 7 says",
    ],
)
def test_a_planted_name_is_caught(text: str) -> None:
    """A line that names a forbidden thing is reported with its number, and ordinary lines beside it are not."""
    paths = machine_paths(Path("/srv2/ada/quartet"), Path("/root"))
    assert paths == ["/srv2/ada/quartet", "/srv2/ada", "/srv2"]
    found = forbidden(f"in /tmp/ring\n{text}\nsglang#27221, /srv20/ada, x/srv2\n", paths)
    assert found, text
    assert all(line.startswith("2: ") for line in found)


def test_functions_fit_in_a_glance() -> None:
    """No function outside kernels and tests has more than sixty lines."""
    paths = [path for path in sources() if path.relative_to(ROOT).parts[0] != "kernels"]
    complaints = [
        f"{path.relative_to(ROOT)}:{line}" for path in paths for line in long_functions(path.read_text(), FUNCTION_CEILING)
    ]
    assert not complaints, "\n".join(complaints)


def test_a_long_function_is_caught() -> None:
    """A function of 61 lines is reported, methods and nested functions included, and one of 60 is not."""
    body = "\n".join("        x = 1" for _ in range(FUNCTION_CEILING))
    assert long_functions(f"class A:\n    def f(self):\n{body}\n", FUNCTION_CEILING) == ["2: A.f has 61 lines"]
    assert long_functions(f"class A:\n    def f(self):\n{body.removesuffix('        x = 1')}\n", FUNCTION_CEILING) == []
    assert [item.name for item in functions("def f():\n    async def g(): ...\n")] == ["f", "f.g"]


def test_functions_are_typed() -> None:
    """Every function of the product has its types but those that Triton compiles; ruff and mypy hold the other packages."""
    assert {path: wrong for path in sources() if (wrong := untyped_functions(path.read_text()))} == {}


def test_an_untyped_function_is_caught() -> None:
    """A function is named that lacks one type, and no compiled one."""
    source = "def f(x, y: int) -> int: ...\ndef g(x: int): ...\n@triton.jit(launch=1)\ndef k(x): ...\ndef h(x: int) -> int: ...\n"
    assert untyped_functions(source) == ["1: f", "2: g"]


def long_files(lengths: dict[str, int], ceiling: int) -> list[str]:
    """Names of the files that have so many lines, or more."""
    return [name for name, length in lengths.items() if length >= ceiling]


def test_files_of_the_core_are_short() -> None:
    """No file of engine/core has 450 lines; the longest would be named by a ceiling of its own length."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "engine" / "core").glob("*.py")}
    assert long_files(lengths, CORE_CEILING) == []
    assert long_files(lengths, max(lengths.values()))


def test_every_test_file_names_its_tier() -> None:
    """Every test file sets `pytestmark` to exactly one tier, so that no tier runs what it cannot."""
    paths = [path for path in TESTED if path.name.startswith("test_")]
    complaints = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in tier_complaints(path.read_text())]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "pytestmark = pytest.mark.slow",
        "pytestmark = [pytest.mark.pure, pytest.mark.cpu]",
        "def f():\n    pytestmark = pytest.mark.cpu",
    ],
)
def test_a_test_file_without_one_tier_is_caught(source: str) -> None:
    """No tier, two tiers, or a tier set inside a function is reported; one tier beside `slow` is not."""
    assert len(tier_complaints(source)) == 1
    assert tier_complaints("pytestmark = [pytest.mark.cpu, pytest.mark.slow]") == []


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("cpu", True),
        ("cpu and not slow", True),
        ("(cpu or serve) and alone", True),
        ("alone", True),
        ("not cpu", False),
        ("serve", False),
        ("pure and not alone", False),
    ],
)
def test_files_without_a_test_of_the_asked_marks_are_told(expression: str, *, matches: bool) -> None:
    """By the tier, which all its tests have, and other marks, which any may have or not."""
    source = "pytestmark = pytest.mark.cpu\n@pytest.mark.slow\ndef test_a(): ...\n@pytest.mark.alone\ndef test_b(): ...\n"
    assert may_match(source, expression) == matches
    assert not may_match("pytestmark = [pytest.mark.cpu, pytest.mark.slow]\n", "cpu and not slow")


def test_an_entry_of_the_changelog_is_a_line() -> None:
    """CHANGELOG.md has versions, sections and entries of one line; a second line, or a line too long, is reported."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert changelog_complaints(text, ENTRY_CEILING) == []
    assert changelog_complaints("## [0.1.0] - 2026-11-23\n### Added\n* One\n  goes on\n", ENTRY_CEILING) == ["4:   goes on"]
    assert changelog_complaints("## Unreleased\n* " + "x" * 199, ENTRY_CEILING) == ["1: ## Unreleased", f"2: * {'x' * 58}"]


def test_one_name_names_one_thing() -> None:
    """No two modules have one stem, none has the standard library's, and no two classes have one name."""
    paths = [path for path in sources() if not path.stem.startswith("__")]
    modules = [(path.stem, module_name(path)) for path in paths if module_name(path) not in STANDING]
    classes = [(name, module_name(path)) for path in paths for name in class_names(path.read_text())]
    borrowed = [module for stem, module in modules if stem in sys.stdlib_module_names]
    assert not (repeated(modules) + repeated(classes) + borrowed)


def test_a_repeated_name_is_caught() -> None:
    """Two places of one name are reported with both of them, and a private class is not."""
    assert repeated([("plan", "a.plan"), ("load", "b.load"), ("plan", "c.plan")]) == ["plan stands in a.plan, c.plan"]
    assert class_names("class A:\n    class B: ...\nclass _C: ...\n") == ["A"]


def test_every_module_says_what_it_is() -> None:
    """Every module of the packages and of the tests has a docstring."""
    paths = [*sources(), *TESTED]
    complaints = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in docstring_complaints(path.read_text())]
    assert not complaints, "\n".join(complaints)


def test_a_module_without_docstring_is_caught() -> None:
    """Code without a docstring is reported; an empty file and a documented one are not."""
    assert docstring_complaints("# a comment is no docstring\nX = 1\n") == ["1: no module docstring"]
    assert docstring_complaints("") == docstring_complaints('"""Says what it is."""\nX = 1\n') == []


def test_the_faults_that_are_planted_have_their_places() -> None:
    """The text that a fault of one line replaces stands once in its file: code that changes takes the table with it."""
    for fault in FAULTS:
        planted(fault, ROOT)
    with pytest.raises(ValueError, match="occurs 0 times"):
        planted(replace(FAULTS[0], old="no such line"), ROOT)


def test_drawn_faults_are_other_programs() -> None:
    """Each of 200 is drawn again by its seed, has an id of its own, and leaves a file that compiles and is another program."""
    found = drawn(ROOT, 200)
    assert found == drawn(ROOT, 200)
    assert found != drawn(ROOT, 200, seed=1)
    assert len({fault.id for fault in found}) == 200
    for fault in found:
        text = planted(fault, ROOT)
        compile(text, fault.file, "exec")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))
    with pytest.raises(ValueError, match="is not where it was"):
        planted(replace(found[0], begin=0), ROOT)
