"""Outputs of encoders by what they are of: those used last on the device, and behind them others on the host.

What comes back from the host is copied, in a hundredth of the time of encoding. Copies keep the order of the device's work.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from engine.rank.upload import downloaded, uploaded

Key = tuple[bytes, tuple[int, ...]]  # digest and shape of an item


class Outputs:
    """Up to `most` bytes of outputs; `bytes`: that it holds now."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._outputs: OrderedDict[Key, Tensor] = OrderedDict()

    def take(self, key: Key) -> Tensor | None:
        """The output, which leaves; None: it is not there."""
        output = self._outputs.pop(key, None)
        self.bytes -= 0 if output is None else output.nbytes
        return output

    def put(self, key: Key, output: Tensor) -> list[tuple[Key, Tensor]]:
        """Keep an output as the one used last; returns those that this leaves no room for."""
        self._outputs[key] = output
        self.bytes += output.nbytes
        left = []
        while self.bytes > self.most:
            key, output = self._outputs.popitem(last=False)
            self.bytes -= output.nbytes
            left.append((key, output))
        return left


class OutputCache:
    """`most` bytes on the device, `host` bytes behind them; what was taken from the host (`host_hits`), and lost (`evictions`)."""

    def __init__(self, device: torch.device, most: int, host: int) -> None:
        self._device = device
        self.on_device, self.on_host = Outputs(most), Outputs(host)
        self.host_hits = self.evictions = 0

    def take(self, key: Key) -> Tensor | None:
        """The output on the device; it leaves the cache. None: it is not there."""
        if (output := self.on_device.take(key)) is None and (held := self.on_host.take(key)) is not None:
            self.host_hits += 1
            output = uploaded(held, self._device)
        return output

    def put(self, key: Key, output: Tensor) -> None:
        """Keep an output as the one used last."""
        for old, left in self.on_device.put(key, output):
            self.evictions += len(self.on_host.put(old, downloaded(left) if self.on_host.most else left))
