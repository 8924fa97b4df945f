"""Rows of tests/bench/results.csv: what a benchmark found, with commit, machine and command."""

import argparse
import csv
import datetime as dt
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).with_name("results.csv")
Row = tuple[str, str, float, str]  # case, metric, value, unit


def add_record_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", metavar="MACHINE", help="append to results.csv under this machine's name")


def append(rows: Iterable[Row], machine: str | None, module: str) -> None:
    """Append to the results file, if --record names a machine; the command is `python -m module` with this process' arguments."""
    if not machine:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    command = f"python -m {module} {' '.join(sys.argv[1:])}"
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for case, metric, value, unit in rows:
            writer.writerow([dt.datetime.now(tz=dt.UTC).date(), commit, machine, command, case, metric, f"{value:.4g}", unit, ""])
