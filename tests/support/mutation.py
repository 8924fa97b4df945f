"""Plants faults, one at a time, and runs the tests that should notice: `python -m tests.support.mutation`.

    --only ID ...    some of the faults
    --drawn N        so many faults that tests/support/drawn_faults.py draws, instead of those of tests/support/mutants.py
    --workers N      copies of the tree in which faults are tried at the same time
    --results FILE   JSON lines of what was found. What was caught is not tried again; the rest is once its tests have changed

Before their first fault tests must pass without one. The time that they take then decides how long they may take with one. A fault
is caught when a test fails twice. Tests that do not end in time are no catch: the fault has timed out. A line a fault says what
became of it; the exit status is 0 if all were caught. A fault whose text is not found exactly once in its file is an error: the
code has changed, and the table must follow. The working tree is copied, and never changed.
"""

import argparse
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tests.support import pytest_forks
from tests.support.drawn_faults import drawn
from tests.support.mutants import FAULTS, Fault
from tests.support.repo_rules import ROOT

CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
LIMIT_TIMES = 3.0  # of the time that the tests take without a fault
LIMIT_FLOOR_S = 30.0  # a machine may be busier than it was
_OUTCOMES = {0: SURVIVED, 1: CAUGHT, 2: CAUGHT, None: TIMED_OUT}  # of pytest's exit statuses; 2: tests could not be collected
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/([^\s[]+)", re.MULTILINE)
_DURATION = re.compile(r"^([\d.]+)s call +tests/(.+)$", re.MULTILINE)
_PLANTED = itertools.count(1)
_SHOWN = 4000  # characters of what pytest said
_TRIES = 3  # at tests of which one fails once and not again: it holds times, and the machine was busy


@dataclass(frozen=True)
class Outcome:
    """What became of a fault; `seen_by`: the test that failed."""

    fault: Fault
    kind: str
    seconds: float
    seen_by: str = ""

    def __str__(self) -> str:
        fault = self.fault
        why = self.seen_by if self.kind == CAUGHT else f"{fault.old!r} -> {fault.new!r}"
        return f"{self.kind:9} {self.seconds:6.1f} s  {fault.id:34} {fault.file}  {why}"


class Results:
    """Outcomes that a file keeps, a line each; the last one of a fault counts."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {_key(row): row for row in map(json.loads, lines)}

    def known(self, fault: Fault, tree: Path) -> Outcome | None:
        """What was found of the fault, if trying it again would find the same."""
        row = self._known.get(_key(_row(fault)))
        if row is None or (row["kind"] != CAUGHT and row["tests"] != digest_of(fault, tree)):
            return None
        return Outcome(fault, row["kind"], row["seconds"], row["seen_by"])

    def add(self, outcome: Outcome, tree: Path) -> None:
        """Keep it."""
        if self._path is not None:
            found = {"kind": outcome.kind, "seconds": round(outcome.seconds, 1), "seen_by": outcome.seen_by}
            with self._path.open("a") as file:
                file.write(json.dumps(_row(outcome.fault) | found | {"tests": digest_of(outcome.fault, tree)}) + "\n")


def _row(fault: Fault) -> dict[str, str]:
    return {"id": fault.id, "old": fault.old, "new": fault.new}


def _key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["id"], row["old"], row["new"]


def digest_of(fault: Fault, tree: Path) -> str:
    """SHA-256 of the fault's file and its test files."""
    names = [fault.file, *(f"tests/{name}" for name in fault.tests.split())]
    return hashlib.sha256(b"".join((tree / name).read_bytes() for name in names)).hexdigest()


def main() -> int:
    """Print a line a fault, then how many there are of each kind. The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID")
    parser.add_argument("--drawn", type=int, metavar="N", default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, metavar="FILE")
    given = parser.parse_args()
    for fault in FAULTS:
        try:
            planted(fault, ROOT)
        except (ValueError, FileNotFoundError) as error:
            parser.error(str(error))
    faults = drawn(ROOT, given.drawn) or list(FAULTS)
    if unknown := set(given.only or ()) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if given.only is None or fault.id in given.only]
    results = Results(given.results)
    known = [outcome for fault in chosen if (outcome := results.known(fault, ROOT))]
    left = [fault for fault in chosen if fault not in {outcome.fault for outcome in known}]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trees = Trees([copied(Path(folder) / str(number)) for number in range(given.workers)])
        found = list(run(left, trees, Baselines(), results))
    for outcome in known:
        print(outcome)
    counts = Counter(outcome.kind for outcome in known + found)
    print(f"{len(chosen)} faults: {', '.join(f'{counts[kind]} {kind}' for kind in (CAUGHT, TIMED_OUT, SURVIVED))}")
    return int(counts[CAUGHT] < len(chosen))


def planted(fault: Fault, tree: Path) -> str:
    """The text of the fault's file, with the fault. ValueError: its place is not there, or not the only one."""
    text = (tree / fault.file).read_text()
    if fault.begin is not None:
        source, end = text.encode(), fault.begin + len(fault.old.encode())
        if source[fault.begin : end] != fault.old.encode():
            raise ValueError(f"{fault.id}: {fault.old!r} is not where it was")
        return (source[: fault.begin] + fault.new.encode() + source[end:]).decode()
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.id}: {fault.old!r} occurs {count} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def copied(tree: Path) -> Path:
    """A copy of the files that git tracks, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)
    return tree


class Trees:
    """Copies of the tree, each lent to one at a time."""

    def __init__(self, trees: Sequence[Path]) -> None:
        self.count = len(trees)
        self._free: queue.Queue[Path] = queue.Queue()
        for tree in trees:
            self._free.put(tree)

    @contextmanager
    def lent(self) -> Iterator[Path]:
        """One of them, when one is free."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


@dataclass(frozen=True)
class Baseline:
    """Tests without a fault. `limit_s`: seconds that they may take with one; `tests`: each, the fastest first."""

    limit_s: float
    tests: tuple[str, ...]


class Baselines:
    """By `Fault.tests`: measured before the first fault that they are to notice."""

    def __init__(self) -> None:
        self._known: dict[str, Baseline] = {}
        self._lock = Lock()

    def of(self, tests: str, tree: Path) -> Baseline:
        """SystemExit: all fail without any fault, and fail again."""
        with self._lock:
            if tests not in self._known:
                self._known[tests] = baseline(tests, tree)
                print(f"{self._known[tests].limit_s:6.1f} s at most: {tests}", flush=True)
            return self._known[tests]


def baseline(tests: str, tree: Path) -> Baseline:
    """As `Baselines.of`, by the time that they take now. Tests that fail twice are left out, and said."""
    began = time.monotonic()
    status, output = run_tests(tests.split(), tree, "--durations=0", "--durations-min=0")
    taken = time.monotonic() - began
    calls = sorted((float(seconds), test) for seconds, test in _DURATION.findall(output))
    failed = []
    if status:
        _, again = run_tests(_FAILED.findall(output), tree)
        failed = _FAILED.findall(again)
        print(f"fails without a fault: {', '.join(failed)}", flush=True)
    names = tuple(test for _, test in calls if test.partition("[")[0] not in failed)
    if status and not names:
        raise SystemExit(f"without a fault:\n{output[-_SHOWN:]}")
    return Baseline(LIMIT_TIMES * taken + LIMIT_FLOOR_S, names)


def run(faults: Sequence[Fault], trees: Trees, baselines: Baselines, results: Results) -> Iterable[Outcome]:
    """Each fault in some tree; once more if it timed out on a machine that is busier than it was."""

    def one(fault: Fault) -> Outcome:
        with trees.lent() as tree:
            outcome = tried(fault, tree, baselines.of(fault.tests, tree))
            if outcome.kind == TIMED_OUT and (later := baseline(fault.tests, tree)).limit_s > outcome.seconds:
                outcome = tried(fault, tree, later)
            results.add(outcome, tree)
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(trees.count) as pool:
        yield from pool.map(one, faults)


def tried(fault: Fault, tree: Path, known: Baseline) -> Outcome:
    """Plant it, run its tests, take it out again."""
    path = tree / fault.file
    text, times = path.read_text(), path.stat()
    path.write_text(planted(fault, tree))
    planted_s = times.st_mtime + 2 * next(_PLANTED)  # compiled modules are known by size and whole second
    os.utime(path, (planted_s, planted_s))
    try:
        return outcome_of(fault, tree, known)
    finally:
        path.write_text(text)
        os.utime(path, (times.st_atime, times.st_mtime))


def outcome_of(fault: Fault, tree: Path, known: Baseline) -> Outcome:
    """What its tests say of a fault that is planted. RuntimeError: pytest could not do its work."""
    began, test = time.monotonic(), ""
    for _ in range(_TRIES):
        status, output = run_tests(known.tests, tree, "-x", limit_s=known.limit_s)
        failed = _FAILED.search(output) if status else None
        test = failed[1] if failed else ""
        if not test:
            break
        status, output = run_tests([test], tree, "-x", limit_s=known.limit_s)
        if status != 0:
            break
    if status is not None and status < 0:
        return Outcome(fault, CAUGHT, time.monotonic() - began, f"pytest died of signal {-status}")
    if status not in _OUTCOMES:
        raise RuntimeError(f"{fault.id}: pytest ended with {status}:\n{output[-_SHOWN:]}")
    return Outcome(fault, _OUTCOMES[status], time.monotonic() - began, test)


def run_tests(tests: Iterable[str], tree: Path, *options: str, limit_s: float | None = None) -> tuple[int | None, str]:
    """As `pytest_forks.run`, of files or tests below tests/."""
    return pytest_forks.run(tree, [*options, *(f"tests/{name}" for name in tests)], limit_s)


if __name__ == "__main__":
    sys.exit(main())
