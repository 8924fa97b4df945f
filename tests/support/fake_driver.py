"""Triton's launches without a GPU: a driver for an sm_90 that is not there, whose kernels are specialised and never compiled.

What Triton hands to a compiled kernel's `run` is kept as a `Start`, so that two ways of launching can be held against each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels import launch as launcher

DEVICE, STREAM = 63, 7


@dataclass(frozen=True)
class Start:
    """What a compiled kernel was given. `hooked`: with Triton's hooks, as its own launch gives them."""

    compiled: "Unbuilt"
    grid: tuple[int, ...]
    stream: int
    function: Any
    metadata: Any
    args: tuple[Any, ...]
    hooked: bool = field(compare=False)

    def same(self, other: "Start") -> bool:
        """The same variant of the kernel, on the same grid and stream, with the very same objects in the same places."""
        here, there = ((x.grid, x.stream, x.function, x.metadata, len(x.args)) for x in (self, other))
        return self.compiled is other.compiled and here == there and all(map(_same, self.args, other.args))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))


class Unbuilt:
    """In place of Triton's compiled kernel: one for each set of types, attributes, constants and options."""

    def __init__(self, source: Any, options: dict[str, Any], starts: list[Start]) -> None:
        self.name, self.options = source.name, options
        self.function, self.packed_metadata = object(), (options["num_warps"], options["num_ctas"], 0)
        self._starts = starts

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *args: Any) -> None:
        """None: no profiler asks."""

    def run(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        """`rest`: launch metadata, two hooks, and the kernel's arguments."""
        self._starts.append(Start(self, (x, y, z), stream, function, metadata, rest[3:], hooked=rest[1] is not None))


@contextmanager
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Start]]:
    """Inside the `with` launches reach a device of this process alone; yields what they started, and forgets its kernels."""
    starts: list[Start] = []
    used: dict[int, Any] = {}

    def unbuilt(source: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> Unbuilt:
        used[id(source.fn)] = source.fn
        return Unbuilt(source, options, starts)

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM,
    )
    compiler = triton.compiler.compile
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(triton.compiler, "compile", unbuilt)
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE)
        patch.setattr(launcher, "_device_capability", lambda device: (9, 0))
        patch.setattr(launcher, "_launcher", launcher._Launcher())
        try:
            yield starts
        finally:
            for kernel in used.values():
                del kernel.device_caches[DEVICE]
                kernel.compile = compiler
