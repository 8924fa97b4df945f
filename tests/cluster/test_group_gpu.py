"""A group on GPUs of one node, whose kernels wait for each other: a rank that is killed in a step ends the others, one that is
stopped for a while does not."""

import asyncio
import signal
import time

import pytest

from cluster.group import Group
from engine.config import engine_config
from engine.errors import EngineDead
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.gpu.exactness import RANKS
from tests.support.engine.groups import Held, Running, alive, ends_after, running, send

pytestmark = pytest.mark.gpu4

STREAMS = 8
LAST = f"rank {RANKS - 1}"
BOUND_S = 5.0
PROMPT = list(range(200, 330))
LONG = SamplingParams(max_tokens=1500)


def boot(nano: Nano) -> Group:
    return Group.boot(engine_config(model=str(nano("31b")), tp=RANKS, device="cuda", dtype="bfloat16", boot_timeout_s=240.0))


def test_a_stopped_rank_is_waited_for(nano: Nano) -> None:
    """SIGSTOP of the last rank under load, and SIGCONT two seconds later: every stream runs to its end, with equal states on all
    ranks, which the watcher compares."""
    group = boot(nano)

    async def stop_for_a_while(run: Running) -> None:
        send(LAST, signal.SIGSTOP)(run)
        await asyncio.sleep(2.0)
        send(LAST, signal.SIGCONT)(run)

    async def main() -> list[BaseException | None]:
        async with running(group) as run:
            return [error for error, _ in await ends_after(run, stop_for_a_while, STREAMS, PROMPT, LONG)]

    assert asyncio.run(main()) == [None] * STREAMS
    assert all(group.status()[0].hashes.values())


def test_a_killed_rank_ends_the_others(nano: Nano) -> None:
    """SIGKILL of the last rank under load: every stream ends with its name, and no process of the group is left, within 5 s."""
    before = Held.now()
    group = boot(nano)
    pids = [child.process.pid for child in group.children]

    def kill(run: Running) -> None:
        nonlocal killed
        killed = time.monotonic()
        send(LAST, signal.SIGKILL)(run)

    async def main() -> list[BaseException | None]:
        async with running(group) as run:
            return [error for error, _ in await ends_after(run, kill, STREAMS, PROMPT, LONG)]

    killed = 0.0
    ends = asyncio.run(main())
    after = time.monotonic() - killed
    print(f"{ends[0]}: all gone after {after:.2f} s")
    assert all(isinstance(error, EngineDead) and str(error).startswith(f"{LAST} was killed by SIGKILL") for error in ends)
    assert not [pid for pid in pids if alive(pid)]
    assert after < BOUND_S
    assert Held.now() == before
