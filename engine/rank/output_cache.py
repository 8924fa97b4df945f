"""Outputs of encoders by what they are of, up to a number of bytes: those used last."""

from collections import OrderedDict

from torch import Tensor

Key = tuple[bytes, tuple[int, ...]]  # digest and shape of an item


class OutputCache:
    """`most` bytes of outputs; `bytes`: that it holds now."""

    def __init__(self, most: int) -> None:
        self._most, self.bytes = most, 0
        self._outputs: OrderedDict[Key, Tensor] = OrderedDict()

    def take(self, key: Key) -> Tensor | None:
        """The output, which leaves the cache; None: it is not there."""
        output = self._outputs.pop(key, None)
        self.bytes -= 0 if output is None else output.nbytes
        return output

    def put(self, key: Key, output: Tensor) -> list[tuple[Key, Tensor]]:
        """Keep an output as the one used last; returns those that this leaves no room for."""
        self._outputs[key] = output
        self.bytes += output.nbytes
        left = []
        while self.bytes > self._most:
            key, output = self._outputs.popitem(last=False)
            self.bytes -= output.nbytes
            left.append((key, output))
        return left
