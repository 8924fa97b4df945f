"""What ranks check at start of the memory that they write into each other, on GPUs of their own."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

import kernels.choose
import kernels.fused_allreduce_norm
import kernels.linear
from engine.errors import ConfigError
from engine.rank.parallel import connect, make_inboxes
from engine.rank.start_checks import check_inboxes
from kernels import launch as launcher
from kernels.fused_allreduce_norm import AllReduceInbox
from tests.gpu.exactness import RANKS

pytestmark = pytest.mark.gpu4

WIDTH = 5376


def plant(kernel: str) -> None:
    """What this rank's `kernel` reads and sends is another number."""
    real = launcher.launch

    def faulty(launched: Any, grid: Any, *args: Any, **named: Any) -> None:
        given = [args[0] + 3, *args[1:]] if launched.__name__ == kernel else args
        real(launched, grid, *given, **named)

    for module in (kernels.fused_allreduce_norm, kernels.linear, kernels.choose):
        module.launch = faulty  # type: ignore[attr-defined]  # of a process of the test's own


@torch.inference_mode()
def rank(index: int, folder: str) -> None:
    """One rank: three checks, the middle one with a fault of the last rank's in products of one row."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    parallel = connect(index, RANKS, device, -1, f"{folder}/store", 60.0)
    inboxes = make_inboxes(parallel, 2 * AllReduceInbox.sharded_rows, 2 * WIDTH, torch.bfloat16)
    assert inboxes is not None
    inboxes.allreduce.wait_at_most(60.0)  # as at boot: the other rank's compiler may take long
    said: list[str | None] = []
    times = []
    for fault in (False, False, True):
        if fault and index == RANKS - 1:
            plant("_gemv")
        began = time.monotonic()
        try:
            said.append(check_inboxes(parallel, inboxes, WIDTH, device, torch.bfloat16))
        except ConfigError as error:
            said.append(str(error))
        times.append(time.monotonic() - began)
    Path(folder, f"rank{index}").write_text(json.dumps([said, times]))


def test_sound_inboxes_pass_and_a_fault_is_found() -> None:
    """All ranks find the group's kernels right, twice; a product that sends another number on one rank is seen by every rank."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank, (folder,), RANKS)
        found = [Path(folder, f"rank{index}").read_text() for index in range(RANKS)]
    print(*found, sep="\n")
    for said, _ in map(json.loads, found):
        assert said[:2] == [None, None]
        assert "a product of 1 rows that is sent to the ranks (kernels.linear) is wrong" in said[2]
