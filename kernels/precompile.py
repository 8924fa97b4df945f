"""Compiles kernels before their first launch, without a GPU or in other processes: `precompile` fills Triton's disk cache, under
the key that the launch will look up.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any

import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels
from kernels.launch import INTERPRET, compiler_options, recorded


@dataclass(frozen=True)
class ListedLaunch:
    kernel: str
    grid: tuple[int, ...]
    constexprs: dict[str, Any]
    function: Any = field(default=None, compare=False, repr=False)
    # Triton's type of each parameter, and what is compiled in: the value of a "constexpr", "D" for
    # one divisible by 16;  empty under the interpreter
    specialization: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    @property
    def variant(self) -> Hashable:
        return self.function, self.specialization, *compiler_options(self.constexprs).values()


def set_cache_keys() -> None:
    """Sets all keys in one order: a key includes a called function's globals only if that function's key was set before
    (`triton.runtime.jit.DependenciesFinder`)."""
    for module in sorted(iter_modules(kernels.__path__), key=attrgetter("name")):
        for function in vars(import_module(f"kernels.{module.name}")).values():
            if isinstance(function, JITFunction):
                assert function.cache_key


@contextmanager
def listed(target: tuple[int, int] | None = None, processors: int = 132) -> Iterator[list[ListedLaunch]]:
    """Lists the launches made inside the `with`. With a `target` (compute capability) no kernel starts: ops on meta tensors
    choose as on that GPU."""
    launches: list[ListedLaunch] = []
    with recorded(lambda *launched: launches.append(_listed(*launched)), target, processors):
        yield launches


def precompile(launch: ListedLaunch, target: tuple[int, int]) -> Any:
    """Triton's compiled kernel for compute capability `target`; memory counts as 16-byte aligned,
    as torch allocates it."""
    major, minor = target
    gpu = GPUTarget("cuda", 10 * major + minor, 32)
    function = launch.function
    options = compiler_options(launch.constexprs)
    values = {name: value for name, (_, value) in zip(function.arg_names, launch.specialization, strict=True)}
    _, *source = function._pack_args(make_backend(gpu), options, values, launch.specialization, options)
    return triton.compile(ASTSource(function, *source), target=gpu, options=options)


def _listed(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], choices: dict[str, Any]) -> ListedLaunch:
    specialization = () if INTERPRET else _binder(kernel)(*args, **choices)[1]
    return ListedLaunch(kernel.__name__, grid, choices, kernel, tuple(specialization))


@cache
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, BaseBackend)
