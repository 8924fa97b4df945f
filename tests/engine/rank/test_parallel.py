"""The choice of collectives and their check at boot; gloo as the judge of what is summed and gathered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.channel import create_shared
from engine.errors import ConfigError
from engine.rank.parallel import Parallel, Single, connect, self_check
from kernels.allreduce import MappedCollectives, shared_bytes
from tests.support import forked
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def mapped(parallel: ThreadParallel, fd: int) -> Parallel:
    """The real thing, for the rank that this thread plays."""
    return connect(parallel.rank, parallel.size, CPU, fd, "", 20.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_connect_chooses_and_the_check_passes(dtype: torch.dtype) -> None:
    """A group of one needs nothing; on CPU a larger one takes the mapped memory; both pass their self-check."""
    alone = connect(0, 1, CPU, -1, "", 1.0)
    assert isinstance(alone, Single)
    self_check(alone, CPU, dtype)
    fd = create_shared("reduce", shared_bytes(4))
    groups = run_ranks(4, lambda parallel: mapped(parallel, fd))
    assert all(isinstance(group, MappedCollectives) for group in groups)
    run_ranks(4, lambda parallel: self_check(groups[parallel.rank], CPU, dtype))
    os.close(fd)


class Wrong(ThreadParallel):
    """Planted faults: `fault` breaks rank 1's long sums, short sums, or the order of its gathers or exchanges."""

    fault = ""

    def all_reduce(self, x: Tensor) -> Tensor:
        total = super().all_reduce(x)
        broken = self.rank == 1 and self.fault == ("long" if x.numel() > 1000 else "short")
        return total - x if broken else total

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        return torch.cat(parts[::-1] if self.rank == 1 and self.fault == "gather" else parts, dim=-1)

    def exchange_rows(self, x: Tensor) -> Tensor:
        rows = super().exchange_rows(x)
        return rows.flip(0) if self.rank == 1 and self.fault == "exchange" else rows


@pytest.mark.parametrize(
    ("fault", "what"),
    [("short", "sum of 64 "), ("long", r"sum of \d{5,} "), ("gather", "gather of 128 "), ("exchange", "exchange of 256 ")],
)
def test_a_wrong_collective_is_named_at_boot(fault: str, what: str) -> None:
    """A path that adds or places wrongly is a ConfigError that names the rank and the message; without a fault there is none."""
    run_ranks(2, lambda parallel: self_check(parallel, CPU, torch.float32))
    with pytest.raises(ConfigError, match=f"rank 1 of 2: the {what}"):
        run_ranks(2, lambda parallel: self_check(parallel, CPU, torch.float32), type("Faulty", (Wrong,), {"fault": fault}))


JUDGE = """
import sys
import torch
from engine.channel import map_shared
from datetime import timedelta
from torch import distributed
from engine.rank import parallel
from kernels.allreduce import MappedCollectives
rank, size, fd, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=30), size, rank)
parallel.SYMMETRIC_BYTES = 0
gloo = object.__new__(parallel.CudaGroup)
gloo.rank, gloo.size = rank, size
ours = MappedCollectives(map_shared(fd), rank, size, 30.0)
for shape in ((1, 96), (70, 33), (2, 200_000)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    theirs, mine = gloo.all_reduce(x.clone()), ours.all_reduce(x.clone())
    assert (theirs - mine).abs().max() < 1e-5, (theirs - mine).abs().max()
    assert (theirs - x).abs().max() > 1e-3
    assert torch.equal(gloo.all_gather(x), ours.all_gather(x))
    assert torch.equal(gloo.all_gather(x[:, :1]).view(-1), ours.all_gather(x[:, :1]).reshape(-1))
    rows = x.flatten()[:96].view(8, 12)
    assert torch.equal(gloo.exchange_rows(rows), ours.exchange_rows(rows))
    assert not torch.equal(gloo.exchange_rows(rows), ours.exchange_rows(rows.flip(0)))
print("agree")
"""


def test_gloo_agrees(tmp_path: Path) -> None:
    """Two processes: sums equal gloo's to 1e-5, gathers and exchanges to the bit; a rank's own part is 100 times as far off."""
    fd = create_shared("reduce", shared_bytes(2))
    processes = [
        forked.Popen(
            [sys.executable, "-c", JUDGE, str(rank), "2", str(fd), str(tmp_path / "store")],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            pass_fds=(fd,),
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    os.close(fd)
    try:
        assert [process.communicate(timeout=60)[0] for process in processes] == [b"agree\n"] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
