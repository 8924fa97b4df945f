"""What a layer's parameters and parts are: one thing under both ways to them, attributes and torch's own lists."""

import pytest
import torch
from torch import nn

from engine.geometry import read_geometry
from engine.rank.models.layers import NormWeights, Shard
from engine.rank.models.module import Module, empty
from engine.rank.models.weight import Weight
from engine.rank.parallel import Single
from engine.weight_formats import PLAIN
from tests.conftest import Nano

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


class Pair(Module):
    """A parameter and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = empty(1, dtype=torch.float32, device=CPU)
        self.part = Weight((2, 2), torch.float32, CPU).stored_as(PLAIN)


def differences(pair: Pair) -> list[str]:
    """Names under which the attribute is not what torch lists, or is found by torch's look-up alone."""
    listed = {**pair._parameters, **pair._modules}
    return [name for name in ("scale", "part") if vars(pair).get(name) is not listed.get(name)]


def test_attributes_follow_what_is_assigned() -> None:
    """Each change by Python's own means reaches both; one past them, as torch's conversions make it, would not."""
    pair = Pair()
    assert differences(pair) == []
    pair.scale, pair.part = empty(1, dtype=torch.float64, device=CPU), Weight((3, 3), torch.float32, CPU).stored_as(PLAIN)
    assert differences(pair) == []
    assert (pair.scale.dtype, pair.part.weight.shape) == (torch.float64, (3, 3))
    pair._parameters["scale"] = empty(1, dtype=torch.float32, device=CPU)
    assert differences(pair) == ["scale"]


def test_what_torch_would_change_behind_attributes_is_refused() -> None:
    """A layer is not moved or converted, also not as another's part."""
    for convert in (nn.Module.double, nn.Module.cpu, nn.Module.share_memory):
        with pytest.raises(AssertionError, match="made on its device"):
            convert(nn.Sequential(Pair()))


def test_norms_by_name(nano: Nano) -> None:
    """Weights have the names that checkpoints are loaded by."""
    shard = Shard(read_geometry(nano("31b")), Single(), torch.float32, CPU)
    norms = NormWeights(shard, ("pre", "post"))
    assert [name for name, _ in norms.named_parameters()] == ["pre", "post"]
    assert norms["post"] is norms.get_parameter("post")
