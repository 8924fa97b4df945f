"""Where every Triton kernel starts: its options, programmatic dependent launch, a record of launches, a count of compilations.

Programmatic dependent launch (PDL, from sm_90 on): a kernel's CTAs may start while the kernel before it still runs. A kernel
that takes part declares `PDL: tl.constexpr` and calls

    wait(PDL)      blocks until all kernels before it in the stream have ended and their writes are visible. Whatever is not
                   constant (activations, tables, lengths) is read after it, and every CTA executes it before its end: then
                   completion is transitive, and a kernel may rely on any earlier one
    trigger(PDL)   the next kernel may start once every CTA of this one has called it or ended

A kernel that does not declare `PDL` is launched without the attribute, so that it cannot end before its predecessors. Under
TRITON_INTERPRET=1, and on GPUs below sm_90, `PDL` is False and both do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# True under the interpreter: no inline PTX there, bf16 operands are raised to fp32 before arithmetic and before `tl.dot`.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def trigger(PDL: tl.constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@dataclass(frozen=True)
class Node:
    """One launch: the kernel's name, its grid, its constexprs and options."""

    kernel: str
    grid: tuple[int, ...]
    constexprs: dict[str, Any]


@dataclass
class _Launcher:
    """What this process has launched."""

    variants: dict[int, Any]      # compiled kernels by id, which Triton keeps alive
    ready: bool = False
    late: int = 0
    nodes: list[Node] | None = None


_launcher = _Launcher({})


def usable(x: Tensor) -> bool:
    """Whether Triton kernels run on `x`: it is on a GPU, or the interpreter is on."""
    return x.is_cuda or bool(INTERPRET)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, pdl: bool = True, **constexprs: Any
) -> None:
    """Starts `kernel` on the current device and stream; `constexprs` are its keyword arguments, `PDL` excepted, which is set here.

    `pdl`: this kernel may start before its predecessor has ended, where the GPU and the kernel can (see the module's docstring)."""
    if "PDL" in kernel.arg_names:
        constexprs["PDL"] = pdl and not INTERPRET and _has_pdl(torch.cuda.current_device())
    if _launcher.nodes is not None:
        _launcher.nodes.append(Node(kernel.__name__, grid, {**constexprs, "warps": warps, "stages": stages}))
    if INTERPRET:
        kernel[grid](*args, **constexprs)
        return
    early = constexprs.get("PDL", False)
    _count(kernel[grid](*args, num_warps=warps, num_stages=stages, launch_pdl=early, **constexprs))


@contextmanager
def record() -> Iterator[list[Node]]:
    """Lists the launches made inside the `with`, in order. A recorder inside a recorder is an error."""
    assert _launcher.nodes is None, "a recorder is active"
    nodes: list[Node] = []
    _launcher.nodes = nodes
    try:
        yield nodes
    finally:
        _launcher.nodes = None


def compilations() -> int:
    """Kernel variants this process has compiled, or loaded from Triton's cache on disk, for its launches so far."""
    return len(_launcher.variants)


def ready() -> None:
    """From here on a compilation stalls requests: it is counted by `late_compilations`."""
    _launcher.ready = True


def late_compilations() -> int:
    """Variants first needed after `ready`: each stalled a step by up to seconds. 0 in a warmed process."""
    return _launcher.late


def variants() -> list[Any]:
    """The compiled variants launched so far, in order: Triton's objects with `.name`, `.n_regs`, `.n_spills` and `.metadata`."""
    return list(_launcher.variants.values())


def _count(compiled: Any) -> None:
    if id(compiled) not in _launcher.variants:
        _launcher.variants[id(compiled)] = compiled
        _launcher.late += _launcher.ready


@cache
def _has_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
