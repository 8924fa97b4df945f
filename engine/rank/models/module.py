"""What models are built of: torch's module, with attributes that are found quickly."""

from typing import Any

import torch
from torch import nn


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Makes a parameter that is loaded later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Module(nn.Module):
    """torch's, whose parameters and parts are found as other attributes are: torch looks for each in three dictionaries, in Python,
    whenever it is read. A model stays on the device and in the dtype that it is made with."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._parameters or name in self._modules:
            vars(self)[name] = value

    def _apply(self, *_: Any, **__: Any) -> "Module":
        """What torch converts and moves parameters by, behind our back."""
        raise AssertionError("a model is made on its device and in its dtype")
