"""The runner of GPU stages, by stages that need none: what passes, fails, hangs with a child, writes nothing, or comes too late."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.stage_table import STAGES, GpuStage
from tests.gpu.stages import END_S, ROOT, run_all

pytestmark = pytest.mark.pure

HANGS = """
import json, os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print(json.dumps([os.getpid(), child.pid]), flush=True)
time.sleep(99)
"""
LEAVES = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
print(json.dumps([os.getpid(), child.pid]))
"""


def stage(name: str, script: str, seconds: float = 20.0, gpus: int = 1) -> GpuStage:
    return GpuStage(name, ("-c", script), seconds, gpus)


PASSES, FAILS = stage("passes", "print('all is well')"), stage("fails", r"print('E       a fault\nso much'); raise SystemExit(3)")


def gone(pid: int) -> bool:
    """Whether a process has ended within a second: its new parent may need a moment to reap it."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_each_stage_ends_as_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that passes, one that fails, one that hangs and has a child, one that leaves a child behind, one that wrote nothing, one
    that needs more GPUs: each is told by a line, and no process of any is left."""
    silent, more = stage("silent", ""), stage("more", "print('never')", gpus=4)
    stages = [PASSES, FAILS, stage("hangs", HANGS, 1.5), stage("leaves", LEAVES), silent, more]
    ends = run_all(stages, 2, tmp_path, 60.0)
    assert [end.how for end in ends] == ["passed", "failed (3)", "timed out", "passed", "passed", "skipped"]
    last = {end.name: end.last for end in ends}
    assert (last["passes"], last["fails"], last["silent"]) == ("all is well", "a fault; so much", "wrote nothing")
    assert last["more"] == "needs 4 GPUs, this machine has 2"
    for name in ("hangs", "leaves"):
        pids = json.loads(last[name])
        assert len(pids) == 2
        assert all(map(gone, pids)), name
    assert [text.split()[0] for text in capsys.readouterr().out.splitlines()] == [each.name for each in stages]
    assert not gone(os.getpid()), "a process that lives is seen"


def test_a_failure_may_end_the_run(tmp_path: Path) -> None:
    """With `stop` nothing runs behind a failure; a stage that is skipped is none."""
    ends = run_all([stage("more", "", gpus=4), PASSES, FAILS, PASSES], 1, tmp_path, 60.0, stop=True)
    assert [end.how for end in ends] == ["skipped", "passed", "failed (3)", "not run"]


def test_the_whole_ends_in_time(tmp_path: Path) -> None:
    """The last stage has what is left of the limit, those behind it nothing, and all of it ends before the limit."""
    began = time.monotonic()
    ends = run_all([stage("hangs", HANGS), PASSES], 1, tmp_path, END_S + 1.0)
    assert [end.how for end in ends] == ["timed out", "not run"]
    assert time.monotonic() - began < END_S + 1.0
    assert all(map(gone, json.loads(ends[0].last)))


def test_what_the_stages_name_is_there() -> None:
    """Test files, modules and names of the stages exist; those of no stage are seen."""
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    named = {word for stage in STAGES for word in stage.arguments if word.startswith("tests/")}
    assert all((ROOT / name).is_file() for name in named)
    modules = {stage.arguments[1] for stage in STAGES} - {"pytest"}
    assert all((ROOT / (module.replace(".", "/") + ".py")).is_file() for module in modules)
    listed = subprocess.check_output([sys.executable, "-m", "tests.gpu.stages", "--list"], cwd=ROOT, text=True)
    assert len(listed.splitlines()) == len(STAGES)
    marked = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    assert marked - {"tests/gpu/test_stages.py"} == named
