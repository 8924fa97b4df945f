"""A profile of captured steps on a GPU: kernels find their modules, and times add up."""

from pathlib import Path

import pytest

from tests.bench.profiling.session import ProfileRequest, profiles
from tests.bench.profiling.step_profile import StepProfile
from tests.nano.random_models import model_folder

pytestmark = pytest.mark.gpu


def profile_of(member: str, batch: int) -> StepProfile:
    """One rank's shard of two in loopback, on a nano shape."""
    folder: Path = model_folder(f"random:{member}")
    request = ProfileRequest(folder, 2, True, "cuda", "bfloat16", (batch,), (500,), 40, 64, read_rate=4e12)
    (found,) = profiles(request, print)
    return found


@pytest.mark.parametrize("batch", [1, 24])
def test_stages_of_a_captured_step(batch: int) -> None:
    """A dense layer is seven kernels, attention and fused norms in their places; stages add up to the step without a profiler."""
    profile = profile_of("31b", batch)
    layer = {stage.name.removeprefix("full "): stage.kernels for stage in profile.stages if stage.name.startswith("full ")}
    assert sum(map(len, layer.values())) == 7
    assert layer["attention"] == ("decode_kernel",)
    assert layer["block"] == ("_allreduce_norm", "_allreduce_norm")
    total = sum(stage.us for stage in profile.stages) / 1e3
    print(f"batch {batch}: step {profile.step_ms:.3f} ms, stages {total:.3f}")
    assert total == pytest.approx(profile.step_ms, rel=0.3)  # the profiler slows launches


@pytest.mark.parametrize("member", ["26b-a4b", "e2b"])
def test_steps_with_operators_of_torch(member: str) -> None:
    """Where torch's own kernels run between ours, every module that reads weights still finds its kernels."""
    profile = profile_of(member, 3)
    assert {"head", "sampling", "full attention.qkv", "full mlp.down"} <= {stage.name for stage in profile.stages if stage.us > 0}
