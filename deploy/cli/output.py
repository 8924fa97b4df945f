"""Command output: JSON for scripts, plain lines for people."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from engine.errors import ConfigError

OK, NO, CANNOT = 0, 1, 2  # exit codes: as asked; trouble, or the answer is no; it cannot run like this


class Table(NamedTuple):
    """Columns whose name begins with `>` are flush right."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


Part = Table | str
Run = Callable[[argparse.Namespace], int]
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    commands: Subparsers, name: str, run: Run, summary: str, teach: str, *, as_json: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand; its --help ends with `teach` verbatim."""
    raw = argparse.RawDescriptionHelpFormatter
    about = f"{summary[:1].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=about, epilog=teach, formatter_class=raw)
    parser.set_defaults(run=run)
    if as_json:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    return parser


def emit(args: argparse.Namespace, value: Any, parts: Iterable[Part]) -> None:
    """Write `value` as JSON with --json, else `parts` as text. ConfigError: stdout failed."""
    if args.json:
        text = json.dumps(value, indent=2)
    else:
        text = "\n".join(plain(parts))
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter must not complain when it flushes
        if not isinstance(error, BrokenPipeError):  # `quartet ... | head`: nobody reads on
            raise ConfigError(f"stdout: {error.strerror}") from error


def plain(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield from _columns(part)


def _columns(table: Table) -> Iterator[str]:
    heads = tuple(name.removeprefix(">") for name in table.columns)
    if any(heads):
        rows = [heads, *table.rows]
    else:
        rows = list(table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, table.columns, strict=True)
        yield "  ".join(cell.rjust(width) if name.startswith(">") else cell.ljust(width) for cell, width, name in cells).rstrip()


def gib(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB"
