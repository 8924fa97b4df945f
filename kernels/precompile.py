"""Compile kernels before their first launch, on a machine without a GPU or in other processes than the one that launches them.

`listed(target)` lists the launches of what runs inside it and starts none: ops called on tensors of the meta device choose
kernels, tiles and grids as they would on a GPU of that compute capability. `precompile` compiles a listed launch into Triton's
cache on disk under the key that the launch will look up: a process that launches it loads it in milliseconds.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kernels
from kernels.launch import INTERPRET, Configured, compiler_options, recorded

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


_OPTIONS = ("warps", "stages")
_DIVISIBLE = [["tt.divisibility", 16]]
_CONSTANTS_HAVE_ATTRIBUTES = not triton.__version__.startswith("3.6.")  # an empty list each, as part of the cache's key


@dataclass(frozen=True)
class ListedLaunch:
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

    @property
    def variant(self) -> Hashable:
        """Tells the compiled kernel that it needs from others."""
        constexprs, types, constants = (frozenset(x.items()) for x in (self.constexprs, self.types, self.constants))
        return self.function, constexprs, types, constants, self.aligned


def set_cache_keys() -> None:
    """Set Triton's keys of all our functions, in one order: a key has the globals of a called function only if that had its own
    before (`triton.runtime.jit.DependenciesFinder`), and what one process compiles another would not find."""
    for module in sorted(iter_modules(kernels.__path__), key=attrgetter("name")):
        for function in vars(import_module(f"kernels.{module.name}")).values():
            if isinstance(function, JITFunction):
                assert function.cache_key


@contextmanager
def listed(target: tuple[int, int] | None = None, processors: int = 132) -> Iterator[list[ListedLaunch]]:
    """Lists the launches made inside the `with`, in order; with a `target` (compute capability, and streaming multiprocessors) they
    are not started."""
    launches: list[ListedLaunch] = []
    with recorded(lambda *launched: launches.append(_listed(*launched)), target, processors):
        yield launches


def precompile(launch: ListedLaunch, target: tuple[int, int]) -> Any:
    """Triton's compiled kernel of the launch for a GPU of compute capability `target`; memory counts as 16-byte aligned, as torch
    allocates it."""
    major, minor = target
    names = launch.function.arg_names
    constexprs = {name: value for name, value in launch.constexprs.items() if name not in _OPTIONS} | launch.constants
    source = ASTSource(
        launch.function,
        signature={name: launch.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): constexprs[name] for name in names if name in constexprs},
        attrs={(index,): noted for index, name in enumerate(names) if (noted := _attributes(launch, name)) is not None},
    )
    chosen = {name: launch.constexprs[name] for name in _OPTIONS}
    options = compiler_options(**chosen, pdl=launch.constexprs.get("PDL", False))
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


def _attributes(launch: ListedLaunch, name: str) -> list[list[Any]] | None:
    """What Triton's own launch notes of an argument; None: nothing, as of arguments that it must not specialise on, and floats."""
    if name not in launch.types:
        return [] if _CONSTANTS_HAVE_ATTRIBUTES else None
    if launch.function.params[launch.function.arg_names.index(name)].do_not_specialize:
        return None
    if name in launch.aligned:
        return _DIVISIBLE
    return [] if launch.types[name].startswith(("*", "i")) else None


def _listed(configured: Configured, grid: tuple[int, ...], args: tuple[Any, ...]) -> ListedLaunch:
    kernel = configured.kernel
    options = {"warps": configured.warps, "stages": configured.stages}
    named = dict(zip(kernel.arg_names, args, strict=False))
    specialised = {name for name, arg in named.items() if _specialised(kernel, name, arg)}
    constants = {name: arg for name, arg in named.items() if arg is None or (name in specialised and arg == 1)}
    types = {name: _type(arg) for name, arg in named.items() if name not in constants}
    aligned = (name for name in types if _aligned(kernel, name, named[name]) or (name in specialised and named[name] % 16 == 0))
    return ListedLaunch(kernel.__name__, grid, {**configured.with_pdl(), **options}, kernel, types, tuple(aligned), constants)


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
