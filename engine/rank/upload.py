"""Asynchronous copies between host and device."""

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor, device

from engine.plan import DEPTH


def staging(to: device, *shape: int) -> Iterator[Tensor]:
    """Zeroed host memory int32 for each step in turn, DEPTH + 1 of them, pinned for a GPU."""
    return cycle([torch.zeros(shape, dtype=torch.int32, pin_memory=to.type == "cuda") for _ in range(DEPTH + 1)])


def uploaded(tensor: Tensor, to: device) -> Tensor:
    """Through pinned memory on a GPU, which torch keeps until the copy ends."""
    if to.type == "cuda":
        return tensor.pin_memory().to(to, non_blocking=True)
    return tensor.to(to)


def downloaded(tensor: Tensor, host: Tensor | None = None) -> Tensor:
    """`host`: pinned memory of the tensor's shape."""
    if not tensor.is_cuda:
        return tensor.clone()
    if host is None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
