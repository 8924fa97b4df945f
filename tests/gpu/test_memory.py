"""The scales of `tests.gpu.memory`: what an engine and the plan both know agrees, and the rows of a device add up."""

import msgspec
import pytest

from deploy.cli import sizing
from engine.config import EngineConfig, engine_config
from tests.conftest import Nano
from tests.gpu import memory
from tests.gpu.weighed import Stage

pytestmark = pytest.mark.cpu

GIB = 1 << 30


@pytest.fixture
def config(nano: Nano) -> EngineConfig:
    return engine_config(model=str(nano("e2b")), tp=2, device="cpu", dtype="bfloat16", max_seqs=3, max_len=300)


@pytest.mark.slow  # tests/deploy/cli/test_plan_command.py holds plans against four ranks in the fast tier
def test_a_group_on_the_cpu_holds_what_is_planned(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a weighed group that worked agrees to the byte; with a plan for one slot more its pools are off by pages."""
    common, device = memory.measured(config, requests=3, prompt=40)
    assert device == []
    assert [name for name, *_ in common][:2] == ["weights", "KV budget"]
    assert all(ours == plan and ours > 0 for _, ours, plan in common)
    size = sizing.size
    monkeypatch.setattr(sizing, "size", lambda engine, *rest: size(msgspec.structs.replace(engine, max_seqs=4), *rest))
    common, _ = memory.measured(config, requests=3, prompt=40)
    off = {name: abs(ours - (plan or 0)) for name, ours, plan in common if name.startswith("KV pool")}
    assert min(off.values()) > 100e3, off


def test_the_rows_of_a_device_add_up() -> None:
    """Of made-up weighings: what lies beside weights and pools, what is left, and what of it the plan foresaw."""
    common = [("weights", 9 * GIB, 9 * GIB), ("KV budget", 20 * GIB, 19 * GIB), ("KV pool", 5 * GIB, 4 * GIB)]
    used = {"started": 1, "loaded": 11, "ready": 16, "stopped": 18}
    stages = {
        name: Stage(total=32 * GIB, used=size * GIB, allocated=(size - 1) * GIB, cached=size * GIB, peak=17 * GIB)
        for name, size in used.items()
    }
    found = {name: (ours, plan) for name, ours, plan in memory.device_knows(common, stages)}
    assert found["beside weights: budget taken"] == (2 * GIB, sizing.RESERVE)
    assert found["beside weights and pools: after work"] == (4 * GIB, sizing.RESERVE)
    assert found["activations at their peak"] == (2 * GIB, None)
    assert found["left: ready"] == (16 * GIB, 19 * GIB - sizing.RESERVE)
