"""What is compiled beside a rank that loads: all that it launches before it is ready, over processes that end with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import triton

from engine.config import EngineConfig, engine_config
from engine.rank import compile_ahead
from engine.rank.compile_ahead import CompileArgs, launches
from tests.nano.random_models import model_folder
from tests.support import forked
from tests.support.engine import drafters
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

TARGET, SHARES = (9, 0), 3


def config(member: str, folder: Path, tp: int = 1, **changes: Any) -> EngineConfig:
    """Of a few sequences with up to two drafts."""
    model = model_folder(f"random:{member}")
    mtp = {"model": str(drafters.write(model, folder)), "drafts": 2}
    settings = {"max_seqs": 4, "max_len": 2048, "prefill_budget": 64, "mtp": mtp, **changes}
    return engine_config(model=str(model), tp=tp, device="cuda", dtype="bfloat16", load_format="dummy", **settings)


def args(config: EngineConfig, share: int = 0, shares: int = 1, parent: int = 0) -> CompileArgs:
    return CompileArgs(config, TARGET, 132, share, shares, parent)


@pytest.mark.parametrize(("member", "tp"), [("31b", 2), ("31b", 4), ("26b-a4b", 1), ("e2b", 1)])
def test_shares_have_all_that_a_rank_launches(member: str, tp: int, tmp_path: Path) -> None:
    """Together they list the variants of the whole, each once a share; decode steps, prefills, samplers, drafts, sums over ranks
    and encoders among them. Planted fault: without one share some are missing."""
    asked = config(member, tmp_path, tp)
    listed_once = launches(args(asked))
    whole = {launch.variant for launch in listed_once}
    listed = [[launch.variant for launch in launches(args(asked, share, SHARES))] for share in range(SHARES)]
    assert all(len(share) == len(set(share)) for share in listed)
    assert set().union(*listed) == whole
    assert not set().union(*listed[1:]) >= whole
    names = {launch.kernel for launch in listed_once}
    assert {"_gemv", "_gemm", "decode_kernel", "verify_kernel", "_extend", "_choose", "_accept", "_admit", "_attend"} <= names
    assert (tp in {launch.constexprs.get("SIZE") for launch in listed_once}) or tp == 1


def test_each_process_compiles_its_share_while_the_rank_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, each process from another place on; nothing once the rank is gone."""
    compiled = []
    monkeypatch.setattr(compile_ahead, "precompile", lambda launch, target: compiled.append(launch))
    asked = config("31b", tmp_path)

    def run(share: int, parent: int) -> list[object]:
        compiled.clear()
        encoded = msgspec.json.encode(args(asked, share, SHARES, parent)).decode()
        monkeypatch.setattr("sys.argv", ["compile_ahead", encoded])
        compile_ahead.main()
        return [launch.variant for launch in compiled]

    monkeypatch.setattr("signal.alarm", lambda seconds: None)
    for share in range(SHARES):
        expected = [launch.variant for launch in launches(args(asked, share, SHARES))]
        first = len(expected) * share // SHARES
        assert run(share, os.getppid()) == expected[first:] + expected[:first]
    assert run(0, os.getppid() + 1) == []


@pytest.mark.parametrize("changes", [{"mtp": {}, "language_model_only": True}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_boot_finds_what_was_compiled(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Compiled by two processes, all that a rank launches is in the cache, under the keys that it looks up. Planted fault: kernels
    have their keys in the order in which they are launched, another one in every process; before Triton 3.8 it matters."""
    asked = config("31b", tmp_path, max_seqs=1, prefill_budget=16, **changes)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    encoded = [msgspec.json.encode(args(asked, share, 2, os.getpid())).decode() for share in range(2)]
    command = [sys.executable, "-m", "engine.rank.compile_ahead"]
    compilers = [forked.Popen([*command, text], cwd=ROOT, env=environment) for text in encoded]
    assert [process.wait(500) for process in compilers] == [0, 0]

    def boot(*options: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.support.engine.idle_boot", msgspec.json.encode(asked).decode(), *options]
        with forked.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
            return json.loads(process.communicate(timeout=500)[0])

    wrong = boot("as they are launched")
    right = boot()
    assert right["hits"] > 40
    assert right["misses"] == []
    assert wrong["misses"] or triton.__version__ >= "3.8"
