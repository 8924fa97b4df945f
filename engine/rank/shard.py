"""One rank's part of a model, filled by `engine.rank.load`."""

from collections.abc import Iterable

import torch
from torch import nn

from engine.geometry import Geometry, check_tp
from engine.rank.parallel import Parallel
from engine.rank.weight import Weight, empty


class Shard(nn.Module):
    """Weights are empty, of this rank's shapes; `geometry` is the whole model's."""

    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        check_tp(geometry, parallel.size)
        self.geometry = geometry
        self.parallel = parallel
        self.dtype = dtype
        self.device = device

    def matrix(self, *shape: int) -> Weight:
        return Weight(shape, self.dtype, self.device)

    def loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, Weight):
                module.loaded()

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A tensor that no format packs."""
        return empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def norms(self, names: Iterable[str]) -> nn.ParameterDict:
        return nn.ParameterDict({name: self.parameter(self.geometry.hidden) for name in names})
