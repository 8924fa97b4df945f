"""Compiling listed launches ahead of time, without a GPU and in as many processes as one likes.

A node that `kernels.launch.record(target)` listed is compiled into Triton's cache on disk under the key that its launch will
look up: a process that launches it then loads it in milliseconds instead of compiling it in seconds.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launch import Node

_OPTIONS = {"warps": "num_warps", "stages": "num_stages", "registers": "maxnreg"}
_INTEGERS = ("i32", "i64")
# By a type's first letter: pointers, and from Triton 3.7 on constexprs, whose empty list is part of the cache's key.
_ATTRIBUTES: dict[str, list[list[Any]]] = {"*": [["tt.divisibility", 16]]}
if not triton.__version__.startswith("3.6."):
    _ATTRIBUTES["c"] = []


def precompile(node: Node, target: tuple[int, int]) -> Any:
    """Triton's compiled kernel of `node` for a GPU of compute capability `target`. Pointers count as 16-byte aligned, as torch's
    allocator makes them, but for those that the kernel does not specialise on. An integer that Triton would specialise on is an
    error: it makes variants that nobody listed."""
    major, minor = target
    names = node.function.arg_names
    signature = {name: node.types.get(name, "constexpr") for name in names}
    for parameter in node.function.params:
        free = parameter.do_not_specialize or signature[parameter.name] not in _INTEGERS
        assert free, f"{node.kernel} is compiled again for other values of {parameter.name}: name it in do_not_specialize"
    constexprs = {(names.index(name),): value for name, value in node.constexprs.items() if name not in _OPTIONS}
    attributes = {
        (parameter.num,): _ATTRIBUTES[signature[parameter.name][0]]
        for parameter in node.function.params
        if signature[parameter.name][0] in _ATTRIBUTES and not parameter.do_not_specialize
    }
    options = {theirs: node.constexprs[ours] for ours, theirs in _OPTIONS.items()}
    options["launch_pdl"] = node.constexprs.get("PDL", False)
    source = ASTSource(node.function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
