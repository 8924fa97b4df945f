"""Plants faults, one at a time, and runs the tests that should notice: `python -m tests.support.mutation`.

    --only ID ...    some of tests/support/mutants.py
    --drawn N        so many faults that tests/support/drawn_faults.py draws, instead of the table's
    --workers N      copies of the tree that are worked on side by side
    --limit S        seconds that a fault's tests may take; one that takes longer hangs, and counts as caught

First all of the named tests must pass without a fault. A fault is caught when a test fails twice. A line a fault says what became
of it; the exit status is 0 if none survived. A fault whose text is not found exactly once in its file is an error: the code has
changed, and the table must follow. The working tree is copied, and never changed.
"""

import argparse
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.drawn_faults import drawn
from tests.support.mutants import FAULTS, Fault
from tests.support.repo_rules import ROOT

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "(pure or cpu) and not slow")
CAUGHT, SURVIVED, HUNG = "caught", "survived", "hung"
_OUTCOMES = {0: SURVIVED, 1: CAUGHT, 2: CAUGHT, None: HUNG}  # of pytest's exit statuses; 2: tests could not be collected
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/([^\s[]+)", re.MULTILINE)
_PLANTED = itertools.count(1)
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
        why = self.seen_by if self.kind != SURVIVED else f"{fault.old!r} -> {fault.new!r}"
        return f"{self.kind:8} {self.seconds:6.1f} s  {fault.id:34} {fault.file}  {why}"


def main() -> int:
    """Print a line a fault, then how many there are of each kind. The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", default=[fault.id for fault in FAULTS])
    parser.add_argument("--drawn", type=int, metavar="N", default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240.0)
    given = parser.parse_args()
    if unknown := set(given.only) - {fault.id for fault in FAULTS}:
        parser.error(f"not in the table: {', '.join(sorted(unknown))}")
    faults = drawn(ROOT, given.drawn) or [fault for fault in FAULTS if fault.id in given.only]
    for fault in FAULTS:
        try:
            planted(fault, ROOT)
        except (ValueError, FileNotFoundError) as error:
            parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trees = [copied(Path(folder) / str(number)) for number in range(given.workers)]
        check_clean(faults, trees)
        outcomes = list(run(faults, trees, given.limit))
    counts = Counter(outcome.kind for outcome in outcomes)
    print(f"{len(outcomes)} faults: {', '.join(f'{counts[kind]} {kind}' for kind in (CAUGHT, HUNG, SURVIVED))}")
    return int(counts[SURVIVED] > 0)


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


def check_clean(faults: Iterable[Fault], trees: Sequence[Path]) -> None:
    """SystemExit: a test fails without any fault, and fails again."""
    began, tests = time.monotonic(), sorted({name for fault in faults for name in fault.tests.split()})

    def check(tree: Path, tests: Sequence[str]) -> str:
        status, output = run_tests(tests, tree) if tests else (0, "")
        if failed := _FAILED.findall(output) if status else []:
            status, output = run_tests(failed, tree)
        return output if status else ""

    with ThreadPoolExecutor(len(trees)) as pool:
        complaints = pool.map(check, trees, [tests[at :: len(trees)] for at in range(len(trees))])
    if complaint := "".join(complaints):
        sys.exit(f"without a fault:\n{complaint}")
    print(f"{len(tests)} test files pass without a fault in {time.monotonic() - began:.0f} s", flush=True)


def run(faults: Sequence[Fault], trees: Sequence[Path], limit_s: float) -> Iterable[Outcome]:
    """Each fault in some tree."""
    free = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one(fault: Fault) -> Outcome:
        tree = free.get()
        try:
            outcome = tried(fault, tree, limit_s)
        finally:
            free.put(tree)
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(one, faults)


def tried(fault: Fault, tree: Path, limit_s: float) -> Outcome:
    """Plant it, run its tests, take it out again."""
    path = tree / fault.file
    text, times = path.read_text(), path.stat()
    path.write_text(planted(fault, tree))
    planted_s = times.st_mtime + 2 * next(_PLANTED)  # compiled modules are known by size and whole second
    os.utime(path, (planted_s, planted_s))
    try:
        return outcome_of(fault, tree, limit_s)
    finally:
        path.write_text(text)
        os.utime(path, (times.st_atime, times.st_mtime))


def outcome_of(fault: Fault, tree: Path, limit_s: float) -> Outcome:
    """What its tests say of a fault that is planted. RuntimeError: pytest could not do its work."""
    began, test = time.monotonic(), ""
    for _ in range(_TRIES):
        status, output = run_tests(fault.tests.split(), tree, "-x", limit_s=limit_s)
        failed = _FAILED.search(output) if status else None
        test = failed[1] if failed else ""
        if not test or run_tests([test], tree, "-x", limit_s=limit_s)[0] != 0:
            break
        status = 0
    if status not in _OUTCOMES:
        raise RuntimeError(f"{fault.id}: pytest ended with {status}:\n{output}")
    return Outcome(fault, _OUTCOMES[status], time.monotonic() - began, test)


def run_tests(tests: Iterable[str], tree: Path, *options: str, limit_s: float | None = None) -> tuple[int | None, str]:
    """(pytest's exit status, None after `limit_s`; its last words). At the limit its whole process group ends."""
    with tempfile.TemporaryFile("w+") as output:
        command = [*PYTEST, *options, *(f"tests/{name}" for name in tests)]
        process = subprocess.Popen(command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()[-4000:]


if __name__ == "__main__":
    sys.exit(main())
