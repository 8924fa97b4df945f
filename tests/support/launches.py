"""Lists of launches, and their compilation ahead of time: without a GPU, and in as many processes as one likes.

`record()` lists the launches of what runs inside it. `record(target=(9, 0))` starts none of them: wrappers called on tensors of
the meta device choose kernels, tiles and grids as they would on a GPU of that compute capability, and the nodes hold what a
compiler needs. `precompile` compiles a node into Triton's cache on disk under the key that its launch will look up: a process that
launches it then loads it in milliseconds instead of compiling it in seconds.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import launch
from kernels.launch import INTERPRET, Configured, compiler_options, recorded

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


_OPTIONS = ("warps", "stages", "registers")
_DIVISIBLE = [["tt.divisibility", 16]]
_CONSTANTS_HAVE_ATTRIBUTES = not triton.__version__.startswith("3.6.")  # an empty list each, as part of the cache's key


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


@contextmanager
def record(target: tuple[int, int] | None = None) -> Iterator[list[Node]]:
    """Lists the launches made inside the `with`, in order; with a `target` (compute capability) they are not started."""
    nodes: list[Node] = []
    with recorded(lambda *launched: nodes.append(_node(*launched)), target):
        yield nodes


def variants() -> list[Any]:
    """The compiled variants that this process has launched, in order: Triton's objects with `.name`, `.n_regs` and `.metadata`."""
    return list(launch._launcher.variants.values())


def compilations() -> int:
    """Kernel variants that this process has compiled, or loaded from Triton's cache on disk, for its launches so far."""
    return len(launch._launcher.variants)


def without_overlap() -> AbstractContextManager[object]:
    """Inside the `with`, launches are made without PDL: a kernel starts when its predecessor has ended."""
    return mock.patch.object(launch, "_has_pdl", return_value=False)


def precompile(node: Node, target: tuple[int, int]) -> Any:
    """Triton's compiled kernel of `node` for a GPU of compute capability `target`; pointers count as 16-byte aligned, as torch's
    allocator makes them."""
    major, minor = target
    names = node.function.arg_names
    constexprs = {name: value for name, value in node.constexprs.items() if name not in _OPTIONS} | node.constants
    source = ASTSource(
        node.function,
        signature={name: node.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): constexprs[name] for name in names if name in constexprs},
        attrs={(index,): found for index, name in enumerate(names) if (found := _attributes(node, name)) is not None},
    )
    chosen = {name: node.constexprs[name] for name in _OPTIONS}
    options = compiler_options(**chosen, early=node.constexprs.get("PDL", False))
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


def _attributes(node: Node, name: str) -> list[list[Any]] | None:
    """What Triton's own launch notes of an argument; None: nothing, as of integers that it must not specialise on, and floats."""
    if name not in node.types:
        return [] if _CONSTANTS_HAVE_ATTRIBUTES else None
    if node.function.params[node.function.arg_names.index(name)].do_not_specialize:
        return None
    if name in node.aligned:
        return _DIVISIBLE
    return [] if node.types[name] in {"i32", "i64"} else None


def _node(configured: Configured, grid: tuple[int, ...], args: tuple[Any, ...]) -> Node:
    kernel = configured.kernel
    options = {"warps": configured.warps, "stages": configured.stages, "registers": configured.registers}
    named = dict(zip(kernel.arg_names, args, strict=False))
    seen = {name for name, arg in named.items() if _specialised(kernel, name, arg)}
    constants = {name: arg for name, arg in named.items() if arg is None or (name in seen and arg == 1)}
    types = {name: _type(arg) for name, arg in named.items() if name not in constants}
    aligned = (name for name in types if _aligned(kernel, name, named[name]) or (name in seen and named[name] % 16 == 0))
    return Node(kernel.__name__, grid, {**configured.constexprs_now(), **options}, kernel, types, tuple(aligned), constants)


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
