"""From the host to a rank's device without waiting for it."""

from torch import Tensor, device


def uploaded(tensor: Tensor, to: device) -> Tensor:
    """A host tensor on device `to`: on a GPU through pinned memory, which torch keeps until the copy is over; on a CPU itself."""
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor
