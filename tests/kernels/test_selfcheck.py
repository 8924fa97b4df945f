"""The kernels' checks: nothing to find under the interpreter, and one wrong number of any kernel is found."""

import ctypes
import importlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import kernels
from deploy.cli.main import main
from kernels import launch as launcher
from kernels import linear, selfcheck
from kernels.launch import enabled, plain_torch
from kernels.selfcheck import CHECKS, Check, RandomInputs, failure, failures
from tests.support import interpreter
from tests.support.guard_pages import guarded
from tests.support.launches import record
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
# What needs other ranks: the check of sums and gathers is engine.rank.parallel.self_check.
OVER_RANKS = {"kernels.allreduce"}
# Checked by kernels.inbox_check, as are those that do more where there are other ranks.
BETWEEN_RANKS = {"_allreduce_norm_sharded", "_wait_for"}


CHECKED = {check.module for check in CHECKS}


def modules_with_kernels() -> set[str]:
    """Modules that start a Triton kernel of their own."""
    sources = {path.stem: path.read_text() for path in (ROOT / "kernels").glob("*.py") if path.stem != "launch"}
    return {f"kernels.{name}" for name, text in sources.items() if "    launch(" in text}


def test_the_package_says_what_each_module_is_for() -> None:
    """Its docstring names every module of the package."""
    named = set(re.findall(r"\w+", kernels.__doc__ or ""))
    assert {path.stem for path in (ROOT / "kernels").glob("*.py")} - named == {"__init__"}


def test_every_kernel_is_checked() -> None:
    """A module that launches kernels has a check, or stands in the list of those that need other ranks."""
    assert modules_with_kernels() - OVER_RANKS == CHECKED
    assert all(Path(importlib.import_module(name).__file__ or "").is_file() for name in CHECKED)


def kernels_of_ours() -> set[str]:
    """Names of the kernels that are launched; other functions are parts of them."""
    sources = (path.read_text() for path in (ROOT / "kernels").glob("*.py") if path.stem != "launch")
    split = re.compile(r"^@triton\.jit", re.MULTILINE).split
    functions = (text.split("def ", 1)[1] for source in sources for text in split(source)[1:])
    return {text.split("(", 1)[0] for text in functions if "PDL: constexpr" in text}


def test_every_check_holds_between_plain_torch_and_itself() -> None:
    """On a CPU without the interpreter both are plain torch."""
    assert failures(CHECKS, CPU, torch.float32) == []


def fine() -> tuple[Tensor, ...]:
    return torch.ones(2, 3), torch.tensor([1, 2])


def checked(*wrong: Tensor) -> str | None:
    """What is said of an op that gives `wrong`, and in plain torch what is fine."""
    answers = iter([wrong, fine()])
    return failure(Check("kernels.linear", "a product", lambda _: next(answers)), CPU, torch.float32)


def test_a_kernel_that_does_not_start_is_a_failure() -> None:
    """An op that raises is found, with what it said; NaN, a missing row and another integer are."""

    def raises(_: object) -> tuple[Tensor, ...]:
        raise OutOfResources(240000, 101376, "shared memory")

    said = failure(Check("kernels.linear", "a product", raises), CPU, torch.float32)
    assert "a product (kernels.linear) does not run: OutOfResources: out of resource" in str(said)
    rows, numbers = fine()
    assert checked(rows, numbers) is None
    for wrong in (torch.tensor([[1, 1, 1], [1, 1, math.nan]]), torch.tensor([[1.0, 1, 1], [0, 0, 0]])):
        assert "is wrong by" in str(checked(wrong, numbers))
    assert checked(rows, torch.tensor([1, 3])) == "a product (kernels.linear) is wrong by 1"


def test_plain_torch_ends_with_its_block() -> None:
    """Inside it no tensor of any device is a kernel's; behind it they are again."""
    x, weight = (torch.empty(rows, 512, dtype=torch.bfloat16, device="meta") for rows in (1, 512))
    with record(target=(9, 0)) as nodes:
        with plain_torch():
            linear.linear(x, weight)
            assert not enabled(x)
        assert not nodes
        linear.linear(x, weight)
        assert len(nodes) == 1


def test_doctor_runs_the_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--kernels` without a GPU fails; on one it says that all hold, or, planted, which does not and by how much."""

    def found(code: int) -> str:
        assert main(["doctor", "--kernels", "--json"]) == code
        (finding,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "kernel checks")
        return str(finding["found"])

    assert "no GPU" in found(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(selfcheck, "failures", lambda *_: [])
    assert found(0) == f"{len(CHECKS)} hold on a GPU"
    monkeypatch.setattr(selfcheck, "failures", lambda *_: ["the embedding (kernels.embed) is wrong by 0.5"])
    assert found(1) == "the embedding (kernels.embed) is wrong by 0.5"


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@dataclass(frozen=True)
class GuardedInputs(RandomInputs):
    """Inputs beside memory that nobody may touch, behind each or in front of it."""

    front: bool = False

    def fp32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return guarded(super().fp32(*shape, scale=scale), front=self.front)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return guarded(super().floats(*shape, scale=scale), front=self.front)

    def ints(self, *values: int) -> Tensor:
        return guarded(super().ints(*values), front=self.front)

    def rising(self, *shape: int) -> Tensor:
        return guarded(super().rising(*shape), front=self.front)

    def filled(self, value: int, *shape: int) -> Tensor:
        return guarded(super().filled(value, *shape), front=self.front)


@pytest.mark.parametrize("front", [False, True])
def test_what_lies_beside_guarded_inputs_cannot_be_read(front: bool) -> None:
    """The system itself refuses to read four bytes there, and reads those of the tensor."""
    x = guarded(torch.zeros(5), front=front)
    inside, outside = (x.data_ptr(), x.data_ptr() - 4) if front else (x.data_ptr() + 16, x.data_ptr() + 20)
    reading, writing = os.pipe()
    read = [ctypes.CDLL(None).write(writing, ctypes.c_void_p(address), 4) for address in (inside, outside)]
    os.close(reading)
    os.close(writing)
    assert read == [4, -1]


def interpreted_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is started, touches nothing behind its inputs, and agrees with plain torch."""
    monkeypatch.setattr(selfcheck, "RandomInputs", GuardedInputs)
    with record() as nodes:
        assert failures(CHECKS, CPU, torch.float32) == []
    assert {node.kernel for node in nodes} == kernels_of_ours() - BETWEEN_RANKS


def interpreted_nothing_in_front_is_touched() -> None:
    """No kernel reads or writes what lies in front of its inputs."""
    for check in CHECKS:
        check.run(GuardedInputs(CPU, torch.float32, front=True), *check.arguments)


@cache
def launched(check: Check) -> list[str]:
    """Names of the kernels that a check starts, without those of modules that have checks of their own."""
    with record(target=(9, 0)) as nodes:
        check.run(RandomInputs(CPU, torch.float32), *check.arguments)
    others = CHECKED - {check.module}
    return list(dict.fromkeys(node.kernel for node in nodes if node.function.fn.__module__ not in others))


def spoil(tensors: list[Tensor], before: list[Tensor], by: int) -> Iterator[None]:
    """One number, of those that a launch wrote to each tensor, becomes another; integers `by` so much."""
    for given, was in zip(tensors, before, strict=True):
        fp8 = given.dtype == torch.float8_e4m3fn  # a number's next one, by its bits
        tensor, old = (given.view(torch.uint8), was.view(torch.uint8)) if fp8 else (given, was)
        written = ((tensor != old) & ~tensor.isnan()).nonzero()
        if len(written):
            place = tuple(written[len(written) // 2].tolist())
            tensor[place] += 1 + tensor[place].abs() if tensor.is_floating_point() else by
            yield


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """What a launch has written to new memory is all that differs from NaN, at every run."""
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` imports the compiler too
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("number", range(len(CHECKS)))
def interpreted_a_wrong_number_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of what each kernel writes is changed: the first check that starts it fails, each time."""
    check, seen = CHECKS[number], {name for check in CHECKS[:number] for name in launched(check)}
    module, real = importlib.import_module(check.module), launcher.launch
    for name in launched(check):
        if name in seen:
            continue
        spoiled = 0

        def faulty(kernel: Any, grid: Any, *args: Any, name: str = name, **named: Any) -> None:
            nonlocal spoiled
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            before = [tensor.clone() for tensor in tensors]
            real(kernel, grid, *args, **named)
            if kernel.__name__ == name:
                by = -1 if name == "_count" else 1  # a count too many would send the next kernel out of its memory
                spoiled += sum(1 for _ in spoil(tensors, before, by))

        monkeypatch.setattr(module, "launch", faulty)
        said = failure(check, CPU, torch.float32)
        assert spoiled, name
        assert f"({check.module}) is wrong" in str(said), name
