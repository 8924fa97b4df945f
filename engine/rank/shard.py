"""One rank's part of a model: what its layers are made of and what `engine.rank.load` fills."""

from collections.abc import Iterable

import torch
from torch import nn

from engine.geometry import Geometry, check_tp
from engine.rank.parallel import Parallel
from engine.rank.weight import Weight, empty


class Shard(nn.Module):
    """One rank's part of a model, whose `geometry` is the whole model's; weights are empty, of this rank's shapes, for `device`."""

    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        check_tp(geometry, parallel.size)
        self.geometry, self.parallel, self.dtype, self.device = geometry, parallel, dtype, device

    def matrix(self, *shape: int) -> Weight:
        """Makes one of its matrices, empty."""
        return Weight(shape, self.dtype, self.device)

    def loaded(self) -> None:
        """Called once, when every tensor has been filled."""
        for module in self.modules():
            if isinstance(module, Weight):
                module.loaded()

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """What no format packs, by default in the model's dtype."""
        return empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def norms(self, names: Iterable[str]) -> nn.ParameterDict:
        """Makes weights [hidden] of norms, by name."""
        return nn.ParameterDict({name: self.parameter(self.geometry.hidden) for name in names})
