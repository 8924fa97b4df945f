"""GPU tests and benches, each within a time of its own, all within another: `python -m tests.gpu.stages --help`.

A stage runs in a process group of its own, which is killed when the stage has ended or its time is over: nothing is left on the
GPUs for the next one. What it writes goes into a file; a line says how it ended, a table at the end how all did.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.capability import probe
from tests.gpu.stage_table import STAGES, GpuStage

ROOT = Path(__file__).resolve().parents[2]
END_S = 5.0  # of the whole time, to kill and reap the last stage
_SHOWN = 100  # characters of a stage's last line, and of the first that says what pytest found wrong


@dataclass(frozen=True)
class StageEnd:
    """How: passed, failed (code), timed out, skipped, not run. last: the last line that it wrote, or why it did not run."""

    name: str
    how: str
    last: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:12} {self.seconds:6.1f} s  {self.how:12} {self.last}"


def run_all(stages: Sequence[GpuStage], gpus: int, out: Path, limit_s: float, *, stop: bool = False) -> list[StageEnd]:
    """Every stage, in order, a line each; all of it within `limit_s`. stop: those behind the first failure do not run."""
    out.mkdir(parents=True, exist_ok=True)
    ends: list[StageEnd] = []
    deadline = time.monotonic() + limit_s - END_S
    for stage in stages:
        left = deadline - time.monotonic()
        if stage.gpus > gpus:
            end = StageEnd(stage.name, "skipped", f"needs {stage.gpus} GPUs, this machine has {gpus}")
        elif left <= 0 or (stop and not passed(ends)):
            end = StageEnd(stage.name, "not run", f"{limit_s:g} s are over" if left <= 0 else "one before it did not pass")
        else:
            end = run_one(stage, out / f"{stage.name}.log", min(stage.seconds, left))
        ends.append(end)
        print(end, flush=True)
    return ends


def run_one(stage: GpuStage, log: Path, timeout_s: float) -> StageEnd:
    """One stage, to its end or its time's; its processes are killed behind it."""
    began, how = time.monotonic(), "timed out"
    with log.open("wb") as file:
        command, end_of_file = [sys.executable, *stage.arguments], subprocess.DEVNULL
        process = subprocess.Popen(command, cwd=ROOT, stdin=end_of_file, stdout=file, stderr=file, start_new_session=True)
        try:
            how = f"failed ({code})" if (code := process.wait(timeout_s)) else "passed"
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S / 2)
    written = log.read_text(errors="replace").split("\n")
    last = next((text.strip() for text in reversed(written) if text.strip()), "wrote nothing")
    wrong = next((f"{text[1:].strip()[:_SHOWN]}; " for text in written if text.startswith("E   ")), "")
    return StageEnd(stage.name, how, wrong + last[-_SHOWN:], time.monotonic() - began)


def passed(ends: Sequence[StageEnd]) -> bool:
    """Whether all did that ran."""
    return all(end.how in {"passed", "skipped"} for end in ends)


def main() -> None:
    """The command line; exit code 1 when a stage did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stages", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--list", action="store_true", help="name the stages, and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[stage.name for stage in STAGES], help="these, in this order")
    parser.add_argument("--limit", type=float, default=540.0, metavar="S", help="seconds of all together (default: %(default)s)")
    parser.add_argument("--stop", action="store_true", help="end at the first that does not pass")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "gpu-stages"), help="logs (default: %(default)s)")
    args = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    stages = [known[name] for name in args.only or known]
    if args.list:
        print(*(f"{each.name:12} {each.gpus} GPU {each.seconds:4.0f} s  {' '.join(each.arguments)}" for each in stages), sep="\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `run_one`, which kills the stage
    ends = run_all(stages, len(probe().gpus), args.out, args.limit, stop=args.stop)
    print(f"\nlogs in {args.out}", *ends, sep="\n")
    sys.exit(not passed(ends))


if __name__ == "__main__":
    main()
