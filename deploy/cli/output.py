"""How a command talks: JSON for scripts, Rich on a terminal, plain lines everywhere else."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.table import Table as RichTable

OK, NO, CANNOT = 0, 1, 2  # exit codes: as asked; trouble, or the answer is no; it cannot run like this
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Table:
    """Rows of text under `columns`; a column that begins with `>` is set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


Part = Table | str


class Subparsers(Protocol):
    """What `add_subparsers` gives, as far as a command needs it."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser: ...


def command(commands: Subparsers, name: str, summary: str, teach: str, *, as_json: bool = True) -> argparse.ArgumentParser:
    """A subcommand whose --help ends with `teach`, shown as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    about = f"{summary[:1].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=about, epilog=teach, formatter_class=raw)
    if as_json:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    return parser


def emit(value: Any, parts: Iterable[Part], *, as_json: bool) -> None:
    """`value` as JSON, or `parts` as text, on stdout."""
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    elif sys.stdout.isatty():
        _rich(parts)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in plain(parts)))
    sys.stdout.flush()


def plain(parts: Iterable[Part]) -> Iterator[str]:
    """Lines: tables as columns two blanks apart, with no borders."""
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield from _columns(part)


def _columns(table: Table) -> Iterator[str]:
    if table.title:
        yield table.title
    heads = tuple(name.removeprefix(">") for name in table.columns)
    rows = [heads, *table.rows] if any(heads) else list(table.rows)
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))] if rows else []
    for row in rows:
        cells = zip(row, widths, table.columns, strict=True)
        yield "  ".join(cell.rjust(width) if name.startswith(">") else cell.ljust(width) for cell, width, name in cells).rstrip()


def _rich(parts: Iterable[Part]) -> None:
    from rich.console import Console

    console = Console()
    for part in parts:
        console.print(rich_table(part) if isinstance(part, Table) else part, markup=False, highlight=False)


def rich_table(table: Table) -> "RichTable":
    """The same table with borders and colours."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(title=table.title or None, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(table.columns))
    for name in table.columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return made


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[], None]]:
    """What to call at each thing done: a bar on stderr where that is a terminal, else one line now. `total` None: unknown."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"quartet: {label}\n")
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def gib(size: float) -> str:
    """Bytes as GiB, or as MiB below one."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.2f} MiB"
