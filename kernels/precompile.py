"""Compiling listed launches ahead of time, without a GPU and in as many processes as one likes.

A node that `kernels.launch.record(target)` listed is compiled into Triton's cache on disk under the key that its launch will
look up: a process that launches it then loads it in milliseconds instead of compiling it in seconds.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launch import Node, compiler_options

_OPTIONS = ("warps", "stages", "registers")
_DIVISIBLE = [["tt.divisibility", 16]]
_CONSTANTS_HAVE_ATTRIBUTES = not triton.__version__.startswith("3.6.")  # an empty list each, as part of the cache's key


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
