"""Launches past Triton's Python: the same kernel on the same arguments as by its own launch, and never one compiled for others."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from kernels import launch as launcher
from kernels import precompile, relaunch
from kernels.launch import Configured, compiler_options, configured, late_compilations, launch, ready
from kernels.relaunch import Variant, launch_key
from tests.support.engine import listed_steps
from tests.support.fake_driver import DEVICE, Start, fake_driver
from tests.support.launches import Node, compilations

pytestmark = pytest.mark.cpu

OPTIONS = ("warps", "stages")
DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
INTEGERS = (0, 1, -1, 2, 15, 16, 17, -16, 32, 2**31 - 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63, 2**64 - 16)
STEPS: dict[str, Callable[[], object]] = {
    "31b decode": lambda: listed_steps.step.__wrapped__("31b", 8),
    "31b mixed": lambda: listed_steps.mixed.__wrapped__(24, 8),
    "26b-a4b decode": lambda: listed_steps.step.__wrapped__("26b-a4b", 8),
    "26b-a4b mixed": lambda: listed_steps.mixed.__wrapped__(100, 8, "26b-a4b"),
}


@dataclass(frozen=True)
class Call:
    """One call of `launch`; `constexprs` with options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]

    def by_launch(self) -> None:
        launch(self.kernel, self.grid, *self.args, **{k: v for k, v in self.constexprs.items() if k != "PDL"})

    def by_triton(self) -> None:
        constexprs = dict(self.constexprs)
        warps, stages = (constexprs.pop(name) for name in OPTIONS)
        options = compiler_options(warps, stages, constexprs.get("PDL", False))
        self.kernel[self.grid](*self.args, **options, **constexprs)

    def variations(self) -> Iterator["Call"]:
        """Itself; with each tensor begun an element later; with each integer another one."""
        yield self
        for at, arg in enumerate(self.args):
            others: Iterable[Any] = ()
            if isinstance(arg, Tensor):
                others = (arg[1:],)
            elif type(arg) is int:
                others = (1, 16, 17, 2**40)
            for other in others:
                yield replace(self, args=(*self.args[:at], other, *self.args[at + 1 :]))


@cache
def calls(step: str) -> tuple[Call, ...]:
    """The launches of a listed step, those of equal layers once, on tensors of the CPU that begin as aligned as the listed ones."""
    found: dict[str, Call] = {}
    listed = precompile._listed

    def keep(made: Configured, grid: tuple[int, ...], args: tuple[Any, ...]) -> Node:
        node = listed(made, grid, args)
        stand_ins = tuple(stand_in(arg) if isinstance(arg, Tensor) else arg for arg in args)
        call = Call(made.kernel, grid, stand_ins, node.constexprs)
        found.setdefault(f"{node} {node.specialization}", call)
        return node

    precompile._listed = keep
    try:
        STEPS[step]()
    finally:
        precompile._listed = listed
    return tuple(found.values())


def stand_in(x: Tensor) -> Tensor:
    """A tensor of `x`'s dtype, as far from a multiple of 16 bytes as `x` is."""
    return torch.empty(64, dtype=x.dtype)[x.storage_offset() * x.element_size() % 16 // x.element_size() :]


def differences(steps: Iterable[Call], starts: list[Start]) -> Iterator[str]:
    """What `launch` starts otherwise than Triton does, at its first call and at its second, which must go past Triton."""
    for call in (variation for step in steps for variation in step.variations()):
        starts.clear()
        call.by_triton()
        call.by_launch()
        call.by_launch()
        (expected, *found), name = starts, call.kernel.__name__
        if not all(start.same(expected) for start in found):
            yield f"{name}: {[(start.grid, start.compiled is expected.compiled) for start in found]}"
        keyed = launch_key(None, DEVICE, True, call.args) is not None
        assert [start.hooked for start in (expected, found[1])] == [True, not keyed], name


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Start]]:
    with fake_driver(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("step", STEPS)
def test_a_steps_launches_are_tritons(step: str, starts: list[Start]) -> None:
    """Every launch of a step, and each with one argument of another kind, gives the variant of the kernel that Triton would give it
    the same arguments in the same places."""
    assert len(calls(step)) > 12
    assert list(differences(calls(step), starts)) == []


def without_alignment(*parts: Any) -> Any:
    return without_args(parts, lambda x: torch.empty(1, dtype=x.dtype) if isinstance(x, Tensor) else x)


def without_integers(*parts: Any) -> Any:
    return without_args(parts, lambda x: 7 if type(x) is int and abs(x) < 2**31 else x)


def without_dtypes(*parts: Any) -> Any:
    return without_args(parts, lambda x: x.view(torch.uint8) if isinstance(x, Tensor) else x)


def without_args(parts: tuple[Configured, int, bool, tuple[Any, ...]], blurred: Callable[[Any], Any]) -> Any:
    return launch_key(*parts[:3], tuple(map(blurred, parts[3])))


def without_constexprs(kernel: Configured, device: int, early: bool, args: tuple[Any, ...]) -> Any:
    alike = configured(kernel.kernel, warps=kernel.warps, stages=kernel.stages)
    return launch_key(alike, device, early, args)


def without_options(kernel: Configured, device: int, early: bool, args: tuple[Any, ...]) -> Any:
    return launch_key(configured(kernel.kernel, **kernel.constexprs), device, early, args)


def without_early(kernel: Configured, device: int, early: bool, args: tuple[Any, ...]) -> Any:
    return launch_key(kernel, device, False, args)


@pytest.mark.parametrize("coarse", [without_alignment, without_constexprs])
def test_a_coarser_key_is_seen(coarse: Any, starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches known by less than that start kernels that were compiled for other arguments."""
    monkeypatch.setattr(launcher, "launch_key", coarse)
    assert len(list(differences(calls("31b decode"), starts))) > 5


@pytest.mark.parametrize("fault", ["swapped", "short", "late"])
def test_a_wrong_start_is_seen(fault: str, starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arguments swapped, a constexpr left out, a constexpr of another launch: each is a difference at every launch."""
    right = Variant.start

    def wrong(self: Variant, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if fault == "swapped":
            args = (args[1], args[0], *args[2:])
        values = {"swapped": self.constexprs, "short": self.constexprs[:-1], "late": (*self.constexprs[:-1], "other")}[fault]
        right(replace(self, constexprs=values), grid, args)

    monkeypatch.setattr(Variant, "start", wrong)
    steps = calls("31b decode")
    assert len(list(differences(steps, starts))) >= len(steps)


# ---- the key


@triton.jit(do_not_specialize=["second", "width"])
def _any(first: tl.tensor, second: tl.tensor, count: tl.tensor, width: tl.tensor, SIZE: tl.constexpr, KIND: tl.constexpr) -> None:
    pass


def launch_any(x: Tensor, count: int = 3) -> None:
    launch(_any, (1,), x, x, count, 5, SIZE=1, KIND=1)


def contradictions(key_of: Callable[..., Any], rounds: int = 9000) -> list[tuple[Any, Any]]:
    """Pairs of calls with equal keys that Triton would compile apart; keys are equal in at least a hundred pairs.

    Calls of a pair differ in one place at most, which anything may stand in that a launch may be given."""
    draw = random.Random(20)
    tensors = [torch.zeros(64, dtype=torch.uint8)[offset : offset + 16 * 2] for offset in range(17)]
    pool = [x.view(dtype) for x in tensors for dtype in DTYPES if x.storage_offset() % dtype.itemsize == 0]
    values = [[*pool, torch.nn.Parameter(pool[1]), *INTEGERS * 3, None, True, False, 0.0, 1.0, 16.0] for _ in range(4)]
    values += [[1, 2, 16, True, None, "x", torch.float32.itemsize], ["a", "b", 1, 2, tl.float32, tl.bfloat16]]
    choices = [(4, 3, True), (8, 3, True), (4, 2, True), (4, 3, False)]
    binder, found, equal = _any.create_binder()[-1], [], 0

    def known(call: list[Any], options: tuple[Any, ...]) -> tuple[Any, Any]:
        named = dict(zip(("SIZE", "KIND"), call[4:], strict=True))
        names = dict(zip(("num_warps", "num_stages", "launch_pdl"), options, strict=True))
        _, specialised, rest = binder(*call[:4], **named, **names)
        kernel = configured(_any, warps=options[0], stages=options[1], **named)
        return key_of(kernel, DEVICE, options[2], tuple(call[:4])), (tuple(specialised), str(rest))

    for _ in range(rounds):
        one = [draw.choice(kinds) for kinds in values]
        at, options = draw.randrange(7), [draw.choice(choices)] * 2
        other = [draw.choice(values[place]) if place == at else value for place, value in enumerate(one)]
        options[1] = draw.choice(choices) if at == 6 else options[0]
        (key, triton_key), (other_key, other_triton_key) = known(one, options[0]), known(other, options[1])
        if key is not None and key == other_key:
            equal += 1
            if triton_key != other_triton_key:
                found.append((one, other))
    assert equal > 100, equal
    return found


def test_equal_keys_mean_equal_specialisation(starts: list[Start]) -> None:
    """Of random arguments, constexprs and options, equal keys imply what Triton's own functions make of both being equal."""
    assert contradictions(launch_key) == []


@pytest.mark.parametrize(
    "coarse", [without_alignment, without_integers, without_dtypes, without_constexprs, without_options, without_early]
)
def test_each_part_of_the_key_is_needed(coarse: Any, starts: list[Start]) -> None:
    """Without it equal keys stand for kernels that Triton compiles apart."""
    assert len(contradictions(coarse)) >= 10


def test_constexprs_by_name(starts: list[Start]) -> None:
    """The same values under names in another order are another launch."""
    x = torch.zeros(4)
    for names in (("SIZE", "KIND"), ("KIND", "SIZE")):
        for _ in range(2):
            launch(_any, (1,), x, x, 3, 5, **dict(zip(names, (1, 2), strict=True)))
    assert [start.args[4:] for start in starts] == [(1, 2)] * 2 + [(2, 1)] * 2
    assert [start.hooked for start in starts] == [True, False] * 2


# ---- when it is Triton's


def test_a_profiler_sees_every_launch(starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a hook listens, launches go through Triton, which calls it; before and behind that they do not."""
    x, hook = torch.zeros(4), triton.knobs.runtime.launch_enter_hook

    def listen(_: Any) -> None:
        pass

    for change in (None, hook.add, None, hook.remove, None):
        if change is not None:
            change(listen)
        launch_any(x)
    assert [start.hooked for start in starts] == [True, True, True, False, False]
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", listen)
    launch_any(x)
    assert starts[-1].hooked


def test_what_has_no_key_is_tritons(starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments by name that are no constexprs, constexprs by place, integers beyond 32 bits, and a Triton that nobody has read."""
    x = torch.zeros(4)
    for _ in range(2):
        launch(_any, (1,), x, x, 3, width=5, SIZE=1, KIND=1)
        launch(_any, (1,), x, x, 3, 5, 1, KIND=1)
        launch_any(x, 2**31)
    monkeypatch.setattr(relaunch, "_KNOWN_TRITON", False)
    for _ in range(2):
        launch_any(x)
    assert all(start.hooked for start in starts)


def test_devices_are_apart(starts: list[Start], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has run on one GPU is Triton's to load on the next, and starts on that one's stream."""
    x = torch.zeros(4)
    monkeypatch.setattr(driver.active, "get_current_stream", lambda device: 100 + device)
    for device in (DEVICE, DEVICE + 1, DEVICE, DEVICE + 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        monkeypatch.setattr(driver.active, "get_current_device", lambda device=device: device)
        launch(_any, (1, 2), x, x, 3, 5, SIZE=1, KIND=1)
    del _any.device_caches[DEVICE + 1]
    assert [(start.stream - 100 - DEVICE, start.hooked) for start in starts] == [(0, True), (1, True), (0, False), (1, False)]
    assert [start.grid for start in starts] == [(1, 2, 1)] * 4


def test_compilations_count_as_before(starts: list[Start]) -> None:
    """Launches past Triton compile nothing; a key that is finer than Triton's is no compilation either."""
    x = torch.zeros(64)
    for offset in (0, 0, 1, 2, 1):
        launch_any(x[offset:])
    assert compilations() == 2
    ready()
    for offset in (0, 1, 2, 3):
        launch_any(x[offset:])
    assert late_compilations() == 0
    launch_any(x, 16)
    assert (compilations(), late_compilations()) == (3, 1)
