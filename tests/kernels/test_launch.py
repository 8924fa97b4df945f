"""The launcher: what it starts, records and counts. Its cases run under the interpreter."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels import launch as launcher
from kernels.launch import cdiv, enabled, late_compilations, launch, next_power_of_2, ready, shared_memory, trigger, wait
from tests.support import interpreter
from tests.support.launches import Node, argument_types, compilations, record

pytestmark = pytest.mark.cpu


@triton.jit
def _add(x: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    tl.store(out + at, tl.load(x + at, at < n) + 1, at < n)
    trigger(PDL)


@triton.jit
def _plain(x: tl.tensor, BLOCK: tl.constexpr) -> None:
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def test_sizes_of_grids_are_tritons() -> None:
    """They give what Triton's functions of these names give, but for the power of 2 from 0 on, where Triton's is 0."""
    numbers = [*range(1, 300), *(2**bits + by for bits in range(9, 31) for by in (-1, 0, 1))]
    assert all(next_power_of_2(n) == triton.next_power_of_2(n) for n in numbers)
    assert next_power_of_2(0) == 1
    assert all(cdiv(n, by) == triton.cdiv(n, by) for n in (0, *numbers[::3]) for by in (1, 2, 3, 32, 1024, 5376))


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


def test_a_failing_interpreted_case_is_seen(tmp_path: Any) -> None:
    """A file whose interpreted case fails, is skipped, or does not exist fails its test."""
    tier = "import pytest\npytestmark = pytest.mark.cpu\n"
    for number, body in enumerate(("def interpreted_x():\n    assert False", "def interpreted_x():\n    pytest.skip('no')", "")):
        file = tmp_path / f"test_{number}.py"
        file.write_text(tier + body)
        with pytest.raises(AssertionError):
            interpreter.run(str(file))


def interpreted_a_launch_runs_and_is_recorded() -> None:
    """The kernel computes; the recorder lists kernels, grids and constexprs in order, and nothing after its end."""
    x = torch.arange(10.0)
    out = torch.zeros(10)
    assert enabled(x)
    with record() as nodes:
        launch(_add, (3,), x, out, 10, BLOCK=4, warps=1)
        launch(_plain, (1,), x, BLOCK=8, registers=128)
    launch(_plain, (1,), x, BLOCK=8)
    assert out.tolist() == [float(i + 1) for i in range(10)]
    assert nodes == [
        Node("_add", (3,), {"BLOCK": 4, "PDL": False, "warps": 1, "stages": 3, "registers": None}),
        Node("_plain", (1,), {"BLOCK": 8, "warps": 4, "stages": 3, "registers": 128}),
    ]
    assert compilations() == 0


def test_a_target_lists_launches_and_starts_none() -> None:
    """On meta tensors, nodes say what a GPU of the target would run: PDL from sm_90 on, types of arguments, nothing is started."""
    x = torch.empty(10, device="meta", dtype=torch.bfloat16)
    assert not enabled(x)
    for target, pdl in (((9, 0), True), ((8, 0), False)):
        with record(target) as nodes:
            assert enabled(x)
            assert not enabled(torch.zeros(1))
            launch(_add, (3,), x, x, 2**40, BLOCK=4)
        assert nodes == [Node("_add", (3,), {"BLOCK": 4, "PDL": pdl, "warps": 4, "stages": 3, "registers": None})]
        assert argument_types(nodes[0]) == {"x": "*bf16", "out": "*bf16", "n": "i64"}
        assert nodes[0].function is _add
    assert compilations() == 0


def test_shared_memory_of_targets() -> None:
    """Each target has its own limit, and one that nobody named the least."""
    x = torch.empty(1, device="meta")
    for target, kib in (((8, 0), 163), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99), ((8, 9), 99)):
        with record(target):
            assert shared_memory(x) == kib * 1024


def interpreted_recorders_do_not_nest() -> None:
    """A recorder inside a recorder is refused, and the next one starts empty."""
    with record(), pytest.raises(AssertionError, match="recorder"), record():
        pass
    with record() as nodes:
        pass
    assert nodes == []


def test_without_the_interpreter_the_cpu_is_not_usable() -> None:
    """Ops keep their references on the CPU."""
    assert not enabled(torch.zeros(1))


class _Kernel:
    """Stands in for a kernel that only Triton may launch: remembers options, and compiles once per set of constexprs."""

    def __init__(self, *names: str) -> None:
        self.arg_names = names
        self.calls = list[Any]()
        self._compiled = dict[str, object]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> object:
            self.calls.append(options)
            return self._compiled.setdefault(str(options), SimpleNamespace())

        return run


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launcher, "_launcher", launcher._Launcher())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield
    launcher._device_capability.cache_clear()


@pytest.mark.parametrize(("capability", "given"), [((9, 0), True), ((8, 9), False)])
def test_pdl_where_gpu_and_kernel_can(
    capability: tuple[int, int], given: bool, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attribute and the constexpr agree; a kernel that never waits is launched without the attribute."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    waits, never = _Kernel("x", "PDL"), _Kernel("x")
    launch(waits, (1,), 0)
    launch(never, (1,), 0)
    options = {"num_warps": 4, "num_stages": 3, "maxnreg": None, "enable_fp_fusion": True}
    assert waits.calls == [options | {"launch_pdl": given, "PDL": given}]
    assert never.calls == [options | {"launch_pdl": False}]


def test_compilations_are_counted_once(fresh: None) -> None:
    """A variant counts when it is first launched; one first launched after `ready` is late, a known one is not."""
    kernel = _Kernel("x")
    for block in (1, 2, 2):
        launch(kernel, (1,), 0, BLOCK=block)
    ready()
    assert (compilations(), late_compilations()) == (2, 0)
    launch(kernel, (1,), 0, BLOCK=1)
    assert late_compilations() == 0
    launch(kernel, (1,), 0, BLOCK=3)
    assert (compilations(), late_compilations()) == (3, 1)
