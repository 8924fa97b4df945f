"""Where every Triton kernel starts: its options, programmatic dependent launch, a record of launches, a count of compilations.

Programmatic dependent launch (PDL, from sm_90 on): a kernel's CTAs may start while the kernel before it still runs. A kernel
that takes part declares `PDL: tl.constexpr` and calls

    wait(PDL)      blocks until all kernels before it in the stream have ended and their writes are visible. Whatever is not
                   constant (activations, tables, lengths) is read after it, and every CTA executes it before its end: then
                   completion is transitive, and a kernel may rely on any earlier one
    trigger(PDL)   the next kernel may start once every CTA of this one has called it or ended

A kernel that does not declare `PDL` is launched without the attribute, so that it cannot end before its predecessors. Under
TRITON_INTERPRET=1, and on GPUs below sm_90, `PDL` is False and both do nothing.

`record()` lists the launches of what runs inside it. `record(target=(9, 0))` starts none of them: wrappers called on tensors of
the meta device choose kernels, tiles and grids as they would on a GPU of that compute capability, and the nodes hold what a
compiler needs.

Triton compiles a kernel, and starts it the first time; launches that need the same variant go past Triton's Python
(`kernels.relaunch`). Ops that every layer launches keep their kernel as `configured` for their shapes, in a cached function of
all that its options and constexprs follow from.
"""

import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.relaunch import Variant, hooked, launch_key, variant

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


@triton.jit
def _now() -> tl.tensor:
    return tl.extra.cuda.globaltimer()


now = time.monotonic_ns if INTERPRET else _now  # in a kernel: nanoseconds of a clock that goes on while nothing runs


# Bytes of shared memory that a block may have, by compute capability; 99 KiB where none is named.
_SHARED = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One launch: the kernel's name, its grid, its constexprs and options; and what a compiler needs beside them.

    `types` of arguments in Triton's words, `aligned` of them divisible by 16; `constants`: arguments that Triton compiles in, by
    their values None and 1."""

    kernel: str
    grid: tuple[int, ...]
    constexprs: dict[str, Any]
    function: Any = field(default=None, compare=False, repr=False)
    types: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    aligned: tuple[str, ...] = field(default=(), compare=False, repr=False)
    constants: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class _Recorder:
    nodes: list[Node]
    target: tuple[int, int] | None


@dataclass
class _Launcher:
    """What this process has launched; compiled variants by id, which Triton keeps alive, and by the launches they serve."""

    variants: dict[int, Any]
    known: dict[Hashable, Variant] = field(default_factory=dict)
    ready: bool = False
    late: int = 0
    disabled: frozenset[str] = frozenset()
    overlap: bool = True
    recorder: _Recorder | None = None

    @property
    def target(self) -> tuple[int, int] | None:
        return self.recorder.target if self.recorder else None


_launcher = _Launcher({})


def enabled(x: Tensor, module: str = "") -> bool:
    """Whether the Triton kernels of `module` (its `__name__`) take `x`: it is on a GPU, the interpreter is on, or launches are only
    listed and it is on meta; and nobody has disabled them."""
    if module in _launcher.disabled:
        return False
    return x.is_cuda or INTERPRET.value or (x.is_meta and _launcher.target is not None)


def disable(modules: Iterable[str]) -> None:
    """From here on the ops of these modules run in plain torch: `kernels.selfcheck` found their kernels wrong on this GPU."""
    _launcher.disabled |= frozenset(modules)


def disabled() -> frozenset[str]:
    """The modules whose kernels are not used."""
    return _launcher.disabled


@contextmanager
def plain_torch(module: str) -> Iterator[None]:
    """Inside the `with` the ops of `module` run in plain torch."""
    before = _launcher.disabled
    disable([module])
    try:
        yield
    finally:
        _launcher.disabled = before


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that a block may have on `x`'s GPU, or on the recorder's target; an H200's under the interpreter."""
    target = _device_capability(x.device.index) if x.is_cuda else _launcher.target or (9, 0)
    return _SHARED.get(target, 101376)


@dataclass(frozen=True, eq=False)
class Configured:
    """A kernel with its options and constexprs, `PDL` excepted: all that a variant is compiled for but the kinds of its arguments.

    overlaps: it may start before its predecessor has ended, where the GPU can."""

    kernel: Any
    warps: int
    stages: int
    registers: int | None
    overlaps: bool
    constexprs: dict[str, Any]

    @property
    def __name__(self) -> str:
        """The kernel's."""
        name: str = self.kernel.__name__
        return name

    def constexprs_now(self) -> dict[str, Any]:
        """With `PDL` as it is for a launch here and now, where the kernel declares it."""
        return {**self.constexprs, "PDL": self.overlaps and _has_pdl()} if "PDL" in self.kernel.arg_names else self.constexprs

    def node(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> Node:
        """A launch of it here and now."""
        options = {"warps": self.warps, "stages": self.stages, "registers": self.registers}
        return _node(self.kernel, grid, {**self.constexprs_now(), **options}, args)


@lru_cache(maxsize=None, typed=True)  # the launcher keeps variants of each anyway
def configured(
    kernel: Any, *, warps: int = 4, stages: int = 3, registers: int | None = None, pdl: bool = True, **constexprs: Any
) -> Configured:
    """The one object for these. `registers`: at most so many a thread. `pdl`: it may start before its predecessor has ended."""
    return Configured(kernel, warps, stages, registers, pdl and "PDL" in kernel.arg_names, constexprs)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **configuration: Any) -> None:
    """Starts `kernel` on the current device and stream, with options and constexprs as in `configured`; what every layer launches
    is `Configured` already, once for its shapes."""
    if configuration or type(kernel) is not Configured:
        kernel = configured(kernel, **configuration)
    if _launcher.recorder is not None:
        _launcher.recorder.nodes.append(kernel.node(grid, args))
        if _launcher.recorder.target is not None:
            return None
    if INTERPRET.value:
        kernel.kernel[grid](*args, **kernel.constexprs_now())
        return None
    device, early = torch.cuda.current_device(), kernel.overlaps and _has_pdl()
    key = launch_key(kernel, device, early, args)
    if (known := _launcher.known.get(key)) is not None and not hooked():
        return known.start(grid, args)
    options = compiler_options(kernel.warps, kernel.stages, kernel.registers, early)
    constexprs = kernel.constexprs_now()
    compiled = kernel.kernel[grid](*args, **options, **constexprs)
    _count(compiled)
    if key is not None and (known := variant(kernel.kernel, compiled, device, args, constexprs)) is not None:
        _launcher.known[key] = known
    return None


def compiler_options(warps: int, stages: int, registers: int | None, early: bool) -> dict[str, Any]:
    """A launch's options in Triton's words. Multiplications and additions are fused whatever Triton's default is: from 3.9 on it
    warns that its own will change."""
    return {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "launch_pdl": early, "enable_fp_fusion": True}


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; an H200's where launches are only listed, 1 on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 132 if device.type == "meta" else 1


@contextmanager
def record(target: tuple[int, int] | None = None) -> Iterator[list[Node]]:
    """Lists the launches made inside the `with`, in order; with a `target` (compute capability) they are not started.

    A recorder inside a recorder is an error."""
    assert _launcher.recorder is None, "a recorder is active"
    nodes: list[Node] = []
    _launcher.recorder = _Recorder(nodes, target)
    try:
        yield nodes
    finally:
        _launcher.recorder = None


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


@contextmanager
def without_overlap() -> Iterator[None]:
    """Inside the `with`, launches are made without PDL: a kernel starts when its predecessor has ended."""
    before, _launcher.overlap = _launcher.overlap, False
    try:
        yield
    finally:
        _launcher.overlap = before


def _count(compiled: Any) -> None:
    if id(compiled) not in _launcher.variants:
        _launcher.variants[id(compiled)] = compiled
        _launcher.late += _launcher.ready


def _node(kernel: Any, grid: tuple[int, ...], constexprs: dict[str, Any], args: tuple[Any, ...]) -> Node:
    named = dict(zip(kernel.arg_names, args, strict=False))
    seen = {name for name, arg in named.items() if _specialised(kernel, name, arg)}
    constants = {name: arg for name, arg in named.items() if arg is None or (name in seen and arg == 1)}
    types = {name: _type(arg) for name, arg in named.items() if name not in constants}
    aligned = (name for name in types if _aligned(kernel, name, named[name]) or (name in seen and named[name] % 16 == 0))
    return Node(kernel.__name__, grid, constexprs, kernel, types, tuple(aligned), constants)


def _specialised(kernel: Any, name: str, arg: Any) -> bool:
    """Whether `arg` is an integer for other values of which Triton compiles other variants."""
    if INTERPRET or isinstance(arg, bool) or not isinstance(arg, int):
        return False
    return not kernel.params[kernel.arg_names.index(name)].do_not_specialize


def _aligned(kernel: Any, name: str, arg: Any) -> bool:
    """Whether Triton compiles a variant for a tensor that begins at a multiple of 16 bytes, as all do that torch allocates."""
    if INTERPRET or not isinstance(arg, Tensor) or kernel.params[kernel.arg_names.index(name)].do_not_specialize:
        return False
    return bool(arg.storage_offset() * arg.element_size() % 16 == 0)


def _type(arg: Any) -> str:
    """The type of an argument in Triton's signatures."""
    if isinstance(arg, Tensor):
        return "*" + _TYPES[arg.dtype]
    if isinstance(arg, bool):
        return "u1"
    if isinstance(arg, int):
        return "i32" if -(2**31) <= arg < 2**31 else "i64"
    if isinstance(arg, float):
        return "fp32"
    return f"tensordesc<{_TYPES[arg.base.dtype]}{list(arg.block_shape)}>"


def _has_pdl() -> bool:
    if not _launcher.overlap:
        return False
    if _launcher.recorder is not None and _launcher.recorder.target is not None:
        return _launcher.recorder.target >= (9, 0)
    return not INTERPRET.value and _device_capability(torch.cuda.current_device()) >= (9, 0)


@cache
def _device_capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
