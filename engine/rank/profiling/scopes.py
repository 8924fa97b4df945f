"""A step cut into nodes: what each part of the model starts, in order.

    step             | upload .. | embedding | blocks.0.attention.qkv | blocks.0.attention | blocks.0.attention.o | blocks.0 | ...
    scope            | ""        | a module's name; what runs between its submodules is its own
    node             | a stretch of one scope in which something was started: on a GPU most often one kernel

Which module runs is told by torch's forward hooks; what it starts, by the launcher's record and, for torch's own operators, by a
dispatch mode. Neither changes what runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.rank.models.architecture import Model
from kernels import launch

TORCH = "torch."  # stands before the name of an operator of torch's own
_STARTS_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh")


@dataclass
class Stretch:
    """Part of a step in one scope; `operations` are kernels that `kernels.launch` started, and torch's operators, in order."""

    scope: str
    operations: list[str] = field(default_factory=list)


class _Operators(TorchDispatchMode):
    """Tells of every operator that runs; views and empty tensors start nothing."""

    def __init__(self, started: Callable[[str], None]) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _STARTS_NOTHING:
            self._started(TORCH + name)
        return func(*args, **(kwargs or {}))


@contextmanager
def scopes(model: Model, entered: Callable[[str], None], left: Callable[[], None]) -> Iterator[None]:
    """Inside the `with`, `entered` hears the name of each module of the model whose forward begins, `left` that one ended.

    The head is no module's forward; it is called "head".
    """
    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(_first(entered, name)))
            handles.append(module.register_forward_hook(lambda *_: left(), always_call=True))
    logits = model.logits

    @wraps(logits)
    def head(hidden: Tensor) -> Tensor:
        entered("head")
        try:
            return logits(hidden)
        finally:
            left()

    model.logits = head  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.logits
        for handle in handles:
            handle.remove()


def _first(entered: Callable[[str], None], name: str) -> Callable[..., None]:
    return lambda *_: entered(name)


class _Cutter:
    """Keeps the scope that is running, and cuts at every change of it."""

    def __init__(self, cut: Callable[[str], None]) -> None:
        self._stack = [""]
        self._cut = cut
        cut("")

    def entered(self, name: str) -> None:
        self._stack.append(name)
        self._cut(name)

    def left(self) -> None:
        self._stack.pop()
        self._cut(self._stack[-1])


def trace(model: Model, step: Callable[[], object]) -> list[Stretch]:
    """Every stretch of one run of `step`, those in which nothing is started included."""
    stretches: list[Stretch] = []
    with launch.record() as launches:
        seen = 0

        def flush() -> None:
            nonlocal seen
            stretches[-1].operations += [node.kernel for node in launches[seen:]]
            seen = len(launches)

        def cut(scope: str) -> None:
            if stretches:
                flush()
            stretches.append(Stretch(scope))

        def operator(name: str) -> None:
            flush()
            stretches[-1].operations.append(name)

        cutter = _Cutter(cut)
        with scopes(model, cutter.entered, cutter.left), _Operators(operator):
            step()
        flush()
    return stretches


def wall_times(model: Model, step: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Seconds of every stretch of one run of `step`: as many as `trace` gives."""
    times: list[float] = []
    cutter = _Cutter(lambda _: times.append(clock()))
    with scopes(model, cutter.entered, cutter.left):
        step()
    times.append(clock())
    return [later - earlier for earlier, later in pairwise(times)]


def align(operations: Sequence[str], kernels: Sequence[str]) -> list[int]:
    """For each kernel that a device ran, by name and in order, the index of the operation that it belongs to.

    A kernel of ours is found by its name. Those of torch's operators have other names, and an operator may run none, or several:
    between two of ours they are shared out in order. ValueError where ours do not come in the order of `operations`.
    """
    ours = {name for name in operations if not name.startswith(TORCH)}
    places: list[int] = []
    waiting = 0  # kernels of torch's since the last of ours
    at = -1
    for kernel in kernels:
        if kernel not in ours:
            waiting += 1
            continue
        found = next((index for index in range(at + 1, len(operations)) if not operations[index].startswith(TORCH)), None)
        if found is None or operations[found] != kernel:
            expected = "the end" if found is None else operations[found]
            raise ValueError(f"kernel {len(places) + waiting} of the step is {kernel}, expected {expected}")
        places += _shared_out(range(at + 1, found), waiting, at)
        places.append(found)
        at, waiting = found, 0
    return places + _shared_out(range(at + 1, len(operations)), waiting, at)


def _shared_out(operators: range, kernels: int, before: int) -> list[int]:
    """So many kernels over these operators, in order; to the one `before` where there are none."""
    if not operators:
        return [max(before, 0)] * kernels
    return [operators[place * len(operators) // kernels] for place in range(kernels)]
