"""Launches as tests see them: listed (`kernels.precompile`), and compiled."""

from typing import Any

from kernels import launch
from kernels.precompile import ListedLaunch as Node
from kernels.precompile import listed as record
from kernels.precompile import precompile

__all__ = ["Node", "argument_types", "compilations", "precompile", "record", "variants"]


def variants() -> list[Any]:
    """The compiled variants that this process has launched, in order: Triton's objects with `.name`, `.n_regs` and `.metadata`."""
    return list(launch._launcher.compiled.values())


def compilations() -> int:
    """Kernel variants that this process has compiled, or loaded from Triton's cache on disk, for its launches so far."""
    return len(launch._launcher.compiled)


def argument_types(node: Node) -> dict[str, str]:
    """Types in Triton's words of the arguments that are not compiled in."""
    named = zip(node.function.arg_names, node.specialization, strict=True)
    return {name: kind for name, (kind, _) in named if kind != "constexpr"}
