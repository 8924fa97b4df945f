"""Kernels compiled without a GPU: PTX, machine code and resources of a recorded launch, for any compute capability."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property

import triton

from tests.support.launches import Node, precompile

_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """A launch compiled for one target. `shared` counts dynamic bytes, `registers` are per thread."""

    node: Node
    target: tuple[int, int]
    shared: int
    ptx: str
    cubin: bytes

    @property
    def registers(self) -> int:
        return self._resources["REG"]

    @property
    def stack(self) -> int:
        """Bytes of a thread's stack and local memory: spills, and the slow paths of functions."""
        return self._resources["STACK"] + self._resources["LOCAL"]

    @cached_property
    def instructions(self) -> list[str]:
        """Machine code, predicates included, operands after the opcode."""
        return _INSTRUCTION.findall(_cuobjdump("-sass", self.cubin))

    @cached_property
    def ptx_memory(self) -> list[str]:
        """Global memory accesses, prefetches and dependency instructions of the PTX, in its order, without predicates."""
        lines = (re.sub(r"^@!?%p\d+\s+", "", line.strip()) for line in self.ptx.splitlines())
        wanted = re.compile(r"(ld|st|atom|red|prefetch)\.[\w.:]*global|cp\.async\.(cg|ca|bulk)|griddepcontrol|prefetch\.global")
        return [line for line in lines if wanted.match(line)]

    @cached_property
    def _resources(self) -> dict[str, int]:
        return {name: int(value) for name, value in _RESOURCE.findall(_cuobjdump("-res-usage", self.cubin))}


def compile_node(node: Node, target: tuple[int, int]) -> Compiled:
    """Compiles a listed launch for a GPU of compute capability `target`."""
    kernel = precompile(node, target)
    return Compiled(node, target, kernel.metadata.shared, kernel.asm["ptx"], kernel.asm["cubin"])


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
