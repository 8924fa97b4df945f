"""Start a kernel again as Triton has started it before, without the Python of Triton's launch.

For each `kernel[grid](...)` Triton binds the arguments, writes the options out as text to look the compiled kernel up, asks its
knobs, and calls two chains of hooks, empty as they are. That is most of what the host spends on a step that is launched kernel by
kernel (`python -m tests.bench.launch_cost`). Here a launch is known by a key instead:

    kernel, options, constexprs     one object for all of them (`kernels.launch.configured`);  device, PDL: as they are
    tensor              its dtype, and by how many bytes it begins behind a multiple of 16
    integer, 32 bits    1, a multiple of 16, or another
    bool, float, None   its type

Whatever Triton compiles apart must have another key, or a kernel runs that was compiled for other arguments; a key may be finer
than Triton's, for that Triton launches once more. Arguments of other kinds have no key: then, and while a profiler listens to
Triton's launches, all is Triton's. What a process changes later of a kernel's globals, or of Triton's debugging, is not looked at.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime import driver

# In these versions `run` and specialisation are as here, on NVIDIA's GPUs; any other launches everything itself.
_KNOWN_TRITON = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({bool, float, type(None)})


@dataclass(frozen=True)
class Variant:
    """A compiled kernel that has run on `device`, and the values of its constexprs, which are its last arguments."""

    compiled: Any
    constexprs: tuple[Any, ...]
    device: int

    def start(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """On the current stream. The three None: what Triton's hooks would be told, and the hooks."""
        kernel, (x, y, z) = self.compiled, (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self.device)
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *self.constexprs)


def launch_key(configured: Hashable, device: int, pdl: bool, args: tuple[Any, ...]) -> Hashable | None:
    """What tells this launch from those that need another variant; None: only Triton can tell.

    configured: one object for each kernel with options and constexprs;  pdl: with programmatic dependent launch."""
    if not _KNOWN_TRITON:
        return None
    kinds: list[Any] = [configured, device, pdl]
    for arg in args:
        kind = type(arg)
        if kind in _TENSORS:
            kinds.append(arg.dtype)
            kinds.append(arg.data_ptr() % 16)
        elif kind is int:
            if not -(2**31) <= arg < 2**31:
                return None
            kinds.append(1 if arg == 1 else 16 if arg % 16 == 0 else 0)
        elif kind in _PLAIN:
            kinds.append(kind)
        else:
            return None
    return tuple(kinds)


def startable(kernel: Any, compiled: Any, device: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> Variant | None:
    """Returns `compiled` as it was launched with these arguments; None where it cannot be started so: `args` must be all that is no
    constexpr, and `constexprs` all behind them."""
    first, names = len(args), kernel.arg_names
    if compiled is None or kernel.pre_run_hooks or kernel.constexprs != list(range(first, len(names))):
        return None
    if constexprs.keys() != set(names[first:]):
        return None
    return Variant(compiled, tuple(constexprs[name] for name in names[first:]), device)


def profiled() -> bool:
    """Whether a profiler listens to Triton's launches."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))
