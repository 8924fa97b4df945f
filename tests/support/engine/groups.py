"""Running a group in a test: its client and watcher on a loop, what it leaves behind, and streams read to their ends."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.group import Group
from cluster.health import Death, Watcher
from engine.front.client import EngineClient
from engine.front.stream import Stream
from engine.protocol import SamplingParams
from tests.support.engine.outcomes import Outcomes
from tests.support.engine.outputs import outputs


@dataclass
class Running:
    """A group under watch. `deaths` are (sentence, monotonic seconds) as the watcher reported them."""

    group: Group
    client: EngineClient
    watcher: Watcher
    deaths: list[tuple[str, float]]
    outcomes: Outcomes


@asynccontextmanager
async def running(group: Group) -> AsyncIterator[Running]:
    """Attach a client and a watcher to `group`, as the replica does; at the end the group is killed."""
    outcomes = Outcomes()
    client = EngineClient(group.front_socket, group.media, sink=outcomes)
    await client.start()
    deaths = []

    def on_death(death: Death) -> None:
        deaths.append((death.sentence, time.monotonic()))
        client.fail(death.sentence)

    watcher = Watcher(group, on_death, waiting=lambda: client.waiting_since, raylet=os.getppid())
    watcher.start()
    try:
        yield Running(group, client, watcher, deaths, outcomes)
    finally:
        watcher.close()
        await client.close()
        group.kill()


async def read(stream: Stream) -> list[int]:
    """All tokens of a stream."""
    return [token async for output in outputs(stream) for token in output.tokens]


async def end_of(stream: Stream) -> tuple[BaseException | None, float]:
    """(what the stream raised, when it ended in monotonic seconds)."""
    try:
        await read(stream)
    except Exception as error:  # noqa: BLE001 - the test looks at whatever it was
        return error, time.monotonic()
    return None, time.monotonic()


async def ends_after(
    run: Running, event: Callable[[Running], Awaitable[None] | None], stream_count: int, prompt: list[int], params: SamplingParams
) -> list[tuple[BaseException | None, float]]:
    """How so many streams ended (error, seconds after `event` began) when it happened while all were running."""
    streams = [asyncio.create_task(end_of(run.client.generate(prompt, params))) for _ in range(stream_count)]
    async with asyncio.timeout(60):
        await until(stream_count, run.client)
        began = time.monotonic()
        if (pending := event(run)) is not None:
            await pending
        return [(error, ended - began) for error, ended in await asyncio.gather(*streams)]


def send(name: str, number: int) -> Callable[[Running], None]:
    """An event: signal `number` to the child called `name`."""
    return lambda run: os.kill(next(child.process.pid for child in run.group.children if child.name == name), number)


async def until(stream_count: int, client: EngineClient) -> None:
    """Wait until the core reports `stream_count` running sequences."""
    while client.load is None or client.load.running < stream_count:  # noqa: ASYNC110 - a test may poll
        await asyncio.sleep(0.01)


def children_of(pid: int) -> set[int]:
    """Living (not zombie) children of `pid`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Held:
    """What this process holds: descriptors, children, shared mappings."""

    descriptors: int
    children: frozenset[int]
    mappings: int

    @classmethod
    def now(cls) -> "Held":
        maps = Path("/proc/self/maps").read_text().count("/memfd:quartet")
        return cls(len(list(Path("/proc/self/fd").iterdir())), frozenset(children_of(os.getpid())), maps)
