"""A cache of encoder outputs by digest: recent ones on the device, older ones on the host.

Outputs evicted from both stay on the host while slots need them: at most `prefill_budget` positions and two items a slot.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rank.upload import downloaded, uploaded

Key = tuple[bytes, tuple[int, ...]]  # digest and shape of an item


@dataclass(eq=False)
class EncodedRows:
    rows: Tensor


class Outputs:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._outputs: OrderedDict[Key, EncodedRows] = OrderedDict()

    def take(self, key: Key) -> EncodedRows | None:
        output = self._outputs.pop(key, None)
        self.bytes -= 0 if output is None else output.rows.nbytes
        return output

    def put(self, key: Key, output: EncodedRows) -> list[tuple[Key, EncodedRows]]:
        """Returns the evicted outputs."""
        self._outputs[key] = output
        self.bytes += output.rows.nbytes
        left = []
        while self.bytes > self.max_bytes:
            key, output = self._outputs.popitem(last=False)
            self.bytes -= output.rows.nbytes
            left.append((key, output))
        return left


class OutputCache:
    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int) -> None:
        self._device = device
        self.on_device = Outputs(device_bytes)
        self.on_host = Outputs(host_bytes)
        self.host_hits = self.evictions = 0

    def take(self, key: Key) -> EncodedRows | None:
        if (output := self.on_device.take(key)) is None and (output := self.on_host.take(key)) is not None:
            self.host_hits += 1
            output.rows = uploaded(output.rows, self._device)
        return output

    def put(self, key: Key, output: EncodedRows) -> None:
        for old, left in self.on_device.put(key, output):
            left.rows = downloaded(left.rows)
            self.evictions += len(self.on_host.put(old, left))
