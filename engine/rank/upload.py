"""Copies between the host and a rank's device that the host does not wait for."""

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor, device

from engine.plan import DEPTH


def staging(to: device, *shape: int) -> Iterator[Tensor]:
    """Yields zeroed host memory int32 of this shape for each step in turn, pinned for a GPU: for those that are out, and one
    more."""
    return cycle([torch.zeros(shape, dtype=torch.int32, pin_memory=to.type == "cuda") for _ in range(DEPTH + 1)])


def uploaded(tensor: Tensor, to: device) -> Tensor:
    """Returns a host tensor on device `to`: on a GPU through pinned memory, which torch keeps until the copy is over; on a CPU
    itself."""
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)


def downloaded(tensor: Tensor, host: Tensor | None = None) -> Tensor:
    """Returns a copy of a device tensor in `host`, pinned memory of its shape, or in new; once the device is there. On a CPU a
    clone."""
    if not tensor.is_cuda:
        return tensor.clone()
    if host is None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
