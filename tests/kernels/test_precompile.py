"""Compiling ahead: what is compiled from a listed launch is found in Triton's cache by the launch itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from kernels.launch import launch, wait
from tests.support.launches import Node, precompile, record

pytestmark = pytest.mark.cpu

TARGET = (9, 0)


class Driver:
    """A GPU that Triton can compile for and not run on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit(do_not_specialize=["rows"])
def _everything(
    x: tl.tensor, y: tl.tensor, rows: tl.tensor, n: tl.tensor, scale: tl.tensor, flag: tl.tensor,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait(PDL)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n) * scale + rows
    if y is not None:
        value += tl.load(y + at, at < n)
    if flag:
        value = -value
    tl.store(x + at, value, at < n)


@pytest.fixture
def hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each compilation found its result in the cache, which is empty at first."""
    found = []
    active = triton.runtime.driver
    monkeypatch.setattr(active, "_active", Driver())
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = lambda *, cache_hit, **others: found.append(cache_hit)
        yield found


def listed(*arguments: Any) -> Node:
    with record(TARGET) as nodes:
        launch(_everything, (1,), *arguments, warps=2, stages=2, registers=64, BLOCK=64)
    return nodes[0]


def start(*arguments: Any) -> None:
    """What a launch does up to the GPU: Triton's own path from arguments to a compiled kernel."""
    described = [argument.dtype if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    _everything.warmup(
        *described, grid=(1,), BLOCK=64, PDL=True,
        num_warps=2, num_stages=2, maxnreg=64, launch_pdl=True, enable_fp_fusion=True,
    )  # fmt: skip


def test_a_launch_finds_what_was_compiled_ahead(hits: list[bool]) -> None:
    """Whatever the arguments are, divisible or not, 1, None or long, and not where one of them is specialised otherwise."""
    x = torch.empty(64, device="meta", dtype=torch.bfloat16)
    runs = (x, x, 16, 48, 0.5, True), (x, None, 7, 47, 0.5, False), (x.float(), x, 1, 1, 2.0, True), (x, x, 2**40, 2**40, 1.0, True)
    for arguments in runs:
        precompile(listed(*arguments), TARGET)
        start(*arguments)
        assert hits == [False, True], arguments
        hits.clear()
    start(x, x, 33, 48, 0.25, True)  # other rows, which are not looked at: known to this process already
    assert hits == []
    start(x, x, 16, 47, 0.5, True)
    assert hits == [False]
