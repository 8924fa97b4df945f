"""A profile of captured steps on a GPU: kernels are told apart, times add up, and what needs no GPU to be known is so."""

from itertools import pairwise
from pathlib import Path

import pytest

from deploy.models.resolve import resolve
from engine.rank.profiling.session import ProfileRequest, profiles
from engine.rank.profiling.step_nodes import StepProfile

pytestmark = pytest.mark.gpu


def profile_of(member: str, batch: int) -> StepProfile:
    """One rank's shard of two in loopback, on a nano shape."""
    folder: Path = resolve(f"random:{member}")
    request = ProfileRequest(folder, 2, True, "cuda", "bfloat16", (batch,), (500,), 40, 64, read_rate=4e12)
    (found,) = profiles(request, print)
    return found


@pytest.mark.parametrize("batch", [1, 24])
def test_nodes_of_a_captured_step(batch: int) -> None:
    """A dense layer is seven nodes, attention and fused norms in their places; nodes add up to the step without a profiler."""
    found = profile_of("31b", batch)
    layer = [" ".join(node.kernels) for node in found.nodes if node.layer == 1]
    assert len(layer) == 7
    assert [layer[at] for at in (1, 3, 6)] == ["decode_kernel", "_allreduce_norm", "_allreduce_norm"]
    assert all(node.us >= 0 and node.alone_us > 0 for node in found.nodes)
    assert all(later.start_us >= earlier.start_us for earlier, later in pairwise(found.nodes))
    total = sum(node.us for node in found.nodes) / 1e3
    print(f"batch {batch}: step {found.step_ms:.3f} ms, nodes {total:.3f}, hidden share {found.hidden_share}")
    assert found.overlapped
    assert total == pytest.approx(found.step_ms, rel=0.3)  # the profiler slows launches


@pytest.mark.parametrize("member", ["26b-a4b", "e2b"])
def test_steps_with_operators_of_torch(member: str) -> None:
    """Where torch's own kernels run between ours, captured or not, every node still finds its kernels."""
    found = profile_of(member, 3)
    timed = [node for node in found.nodes if node.alone_us]
    assert len(timed) > 0.9 * len(found.nodes)
