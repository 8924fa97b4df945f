"""Launches Triton kernels: options, programmatic dependent launch, late compilations.

With programmatic dependent launch (PDL, from sm_90) a kernel's CTAs may start while the previous kernel runs. Such a kernel
declares `PDL: constexpr` and calls

    wait(PDL)      blocks until all earlier kernels of the stream have ended and their writes are visible. Every CTA must call it.
                   If the previous kernel triggers after its own wait, the next may read before its wait what was written before
                   that kernel
    trigger(PDL)   the next kernel may start once every CTA of this one has called it or ended

A kernel without `PDL` cannot end before its predecessors.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

# True under the interpreter: no inline PTX there, bf16 operands are raised to fp32 before arithmetic and before `tl.dot`.
INTERPRET = constexpr(triton.knobs.runtime.interpret)


def cdiv(n: int, by: int) -> int:
    """n / by, rounded up; ten times faster than Triton's."""
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@triton.jit
def wait(PDL: constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def trigger(PDL: constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _now():
    return tl.extra.cuda.globaltimer()


now = time.monotonic_ns if INTERPRET else _now  # in a kernel: nanoseconds of a clock that goes on while nothing runs


# Bytes of shared memory that a block may have, by compute capability; 99 KiB where none is named.
_SHARED = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}


class OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def is_cuda(self) -> bool: ...

    @property
    def is_meta(self) -> bool: ...


@dataclass
class _Launcher:
    compiled: dict[int, Any] = field(default_factory=dict)
    ready: bool = False
    late: int = 0
    plain: bool = False
    recorder: Callable[..., None] | None = None
    target: tuple[int, int] | None = None
    processors: int = 132


_launcher = _Launcher()
_second_stream = cache(torch.cuda.Stream)  # of a device, by its priority
PendingTensor = Callable[[], Tensor]  # makes the current stream wait for it, and gives it


def enabled(x: OnDevice) -> bool:
    """Whether Triton kernels take `x`: on a GPU, under the interpreter, or on meta in `recorded`;
    never in `plain_torch`.
    """
    return not _launcher.plain and (x.is_cuda or INTERPRET.value or (x.is_meta and _launcher.target is not None))


@contextmanager
def plain_torch() -> Iterator[None]:
    _launcher.plain = True
    try:
        yield
    finally:
        _launcher.plain = False


def check_contiguous(*tensors: Tensor | None) -> None:
    """AssertionError unless each tensor is contiguous: kernels get bare pointers."""
    for x in tensors:
        assert x is None or x.is_contiguous(), (x.shape, x.stride())


def shared_memory(x: OnDevice) -> int:
    target = _device_capability(x.device.index) if x.is_cuda else _launcher.target or (9, 0)
    return _SHARED.get(target, 101376)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, registers: int | None = None, **constexprs: Any
) -> None:
    if "PDL" in kernel.arg_names:
        constexprs["PDL"] = _has_pdl()
    choices = {**constexprs, "warps": warps, "stages": stages, "registers": registers}
    if _launcher.recorder is not None:
        _launcher.recorder(kernel, grid, args, choices)
        if _launcher.target is not None:
            return
    options = {} if INTERPRET.value else compiler_options(choices)
    compiled = kernel[grid](*args, **options, **constexprs)
    if compiled is not None and id(compiled) not in _launcher.compiled:
        _launcher.compiled[id(compiled)] = compiled
        _launcher.late += _launcher.ready


def compiler_options(choices: dict[str, Any]) -> dict[str, Any]:
    """A launch's options in Triton's words. From 3.9 on Triton warns without `enable_fp_fusion`."""
    options = {"num_warps": choices["warps"], "num_stages": choices["stages"], "maxnreg": choices["registers"]}
    return {**options, "launch_pdl": choices.get("PDL", False), "enable_fp_fusion": True}


def on_second_stream(run: Callable[[], Tensor], x: OnDevice) -> PendingTensor:
    """Run `run`, which reads `x`, on a second stream; on a CPU at once. Call the returned function for the result before `x` is
    freed.
    """
    if not x.is_cuda:
        result = run()
        return lambda: result
    stream = _second_stream(x.device, torch.cuda.current_stream().priority)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run()

    def join() -> Tensor:
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return join


def processors(device: torch.device) -> int:
    """1 on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return _launcher.processors if device.type == "meta" else 1


@contextmanager
def recorded(recorder: Callable[..., None], target: tuple[int, int] | None, processors: int) -> Iterator[None]:
    """`recorder` gets each launch. With a `target` (compute capability) nothing starts, and ops on meta tensors choose as on that
    GPU.
    """
    assert _launcher.recorder is None, "a recorder is active"
    _launcher.recorder = recorder
    _launcher.target = target
    _launcher.processors = processors
    try:
        yield
    finally:
        _launcher.recorder = _launcher.target = None


def ready() -> None:
    _launcher.ready = True


def late_compilations() -> int:
    """Variants compiled after `ready`; each stalled a step by up to seconds."""
    return _launcher.late


def _has_pdl() -> bool:
    if _launcher.target is not None:
        return _launcher.target >= (9, 0)
    return not INTERPRET.value and _device_capability(torch.cuda.current_device()) >= (9, 0)


@cache
def _device_capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
