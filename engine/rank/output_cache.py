"""A cache of encoders' outputs, by the digest of what they encode: those used last on the device, others behind them on the host.

What comes back from the host is copied, in a hundredth of the time of encoding. Copies keep the order of the device's work.
Slots hold the same outputs, so that their rows are on the device only as far as the cache has room there. Those that it has lost
stay on the host while slots hold them: of each slot at most `prefill_budget` positions and two items.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rank.upload import downloaded, uploaded

Key = tuple[bytes, tuple[int, ...]]  # digest and shape of an item


@dataclass(eq=False)
class EncodedRows:
    """rows [n, hidden] that an encoder gave: on the device, or on the host once the cache has moved them there."""

    rows: Tensor


class Outputs:
    """Up to `max_bytes` bytes of outputs, least recently used first; `bytes`: that it has now."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._outputs: OrderedDict[Key, EncodedRows] = OrderedDict()

    def take(self, key: Key) -> EncodedRows | None:
        """Remove and return the output; None: it is not there."""
        output = self._outputs.pop(key, None)
        self.bytes -= 0 if output is None else output.rows.nbytes
        return output

    def put(self, key: Key, output: EncodedRows) -> list[tuple[Key, EncodedRows]]:
        """Keep an output as the one used last; removes and returns those that there is no room for."""
        self._outputs[key] = output
        self.bytes += output.rows.nbytes
        left = []
        while self.bytes > self.max_bytes:
            key, output = self._outputs.popitem(last=False)
            self.bytes -= output.rows.nbytes
            left.append((key, output))
        return left


class OutputCache:
    """Outputs in up to `device_bytes` on the device, and in `host_bytes` behind them; counts those that came back from the host
    (`host_hits`) and those that were lost (`evictions`)."""

    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int) -> None:
        self._device = device
        self.on_device, self.on_host = Outputs(device_bytes), Outputs(host_bytes)
        self.host_hits = self.evictions = 0

    def take(self, key: Key) -> EncodedRows | None:
        """Remove the output from the cache and return it on the device; None: it is not there."""
        if (output := self.on_device.take(key)) is None and (output := self.on_host.take(key)) is not None:
            self.host_hits += 1
            output.rows = uploaded(output.rows, self._device)
        return output

    def put(self, key: Key, output: EncodedRows) -> None:
        """Keep an output as the one used last; what the device has no room for goes to the host."""
        for old, left in self.on_device.put(key, output):
            left.rows = downloaded(left.rows)
            self.evictions += len(self.on_host.put(old, left))
