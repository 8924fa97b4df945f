"""A group on GPUs of one node, whose kernels wait for each other: a rank that is killed in a step ends the others, one that is
stopped for a while does not."""

import asyncio
import os
import signal
import time

import pytest

from cluster.group import Group
from engine.config import engine_config
from engine.errors import EngineDead
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.gpu.exactness import RANKS
from tests.support.engine.groups import Held, alive, end_of, running, until

pytestmark = pytest.mark.gpu4

STREAMS = 8
BOUND_S = 5.0
PROMPT = list(range(200, 330))
LONG = SamplingParams(max_tokens=1500)


def boot(nano: Nano) -> Group:
    return Group.boot(engine_config(model=str(nano("31b")), tp=RANKS, device="cuda", dtype="bfloat16", boot_timeout_s=240.0))


def test_a_stopped_rank_is_waited_for(nano: Nano) -> None:
    """SIGSTOP of the last rank under load, and SIGCONT two seconds later: every stream runs to its end, with equal states on all
    ranks, which the watcher compares."""
    group = boot(nano)

    async def main() -> list[BaseException | None]:
        async with running(group) as run:
            streams = [asyncio.create_task(end_of(run.client.generate(PROMPT, LONG))) for _ in range(STREAMS)]
            async with asyncio.timeout(60):
                await until(STREAMS, run.client)
                os.kill(group.children[RANKS - 1].pid, signal.SIGSTOP)
                await asyncio.sleep(2.0)
                os.kill(group.children[RANKS - 1].pid, signal.SIGCONT)
                return [error for error, _ in await asyncio.gather(*streams)]

    assert asyncio.run(main()) == [None] * STREAMS
    assert group.status()[0].state_hash != 0


def test_a_killed_rank_ends_the_others(nano: Nano) -> None:
    """SIGKILL of the last rank under load: every stream ends with its name, and no process of the group is left, within 5 s."""
    before = Held.now()
    group = boot(nano)
    pids = [child.pid for child in group.children]

    async def main() -> tuple[float, list[BaseException | None]]:
        async with running(group) as run:
            streams = [asyncio.create_task(end_of(run.client.generate(PROMPT, LONG))) for _ in range(STREAMS)]
            async with asyncio.timeout(60):
                await until(STREAMS, run.client)
                os.kill(pids[RANKS - 1], signal.SIGKILL)
                at = time.monotonic()
                ends = [error for error, _ in await asyncio.gather(*streams)]
        return at, ends

    at, ends = asyncio.run(main())
    after = time.monotonic() - at
    print(f"{ends[0]}: all gone after {after:.2f} s")
    assert all(isinstance(error, EngineDead) and str(error).startswith(f"rank {RANKS - 1} was killed by SIGKILL") for error in ends)
    assert not [pid for pid in pids if alive(pid)]
    assert after < BOUND_S
    assert Held.now() == before
