"""Prints how long functions and files are: `python -m tests.support.sizes`.

Kernels are counted apart: one launch is one function.
"""

from pathlib import Path

from tests.support.repo_rules import ROOT, functions, sources

FILE_CEILING = 500


def main() -> None:
    """One line a group of packages, then every file above the ceiling."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
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
    main()
