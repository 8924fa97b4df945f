"""Ranks for tests: real worker processes over descriptors of our own, or one rank in this process.

No core and no replica: the test writes the plans, reads the results, and plays the replica's part in the handshake.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from cluster.children import environment
from engine.channel import RingReader, RingWriter, create_shared, map_shared, ring_bytes
from engine.config import EngineConfig
from engine.lifeline import Allocate, BootArgs, BootMessage, BootSocket, Configure, Failed, Loaded, Ready
from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.rank.runner import Launched, Runner
from engine.rank.worker import Rank, load
from engine.rank_status import RankStatus, StatusBlock
from kernels.allreduce import shared_bytes

ROOT = Path(__file__).resolve().parents[3]
BOOT_S = 60.0
STEP_S = 20.0
WORKER = ("-m", "engine.rank.worker")
Command = Callable[[int], Sequence[str]]  # rank -> python's arguments before argv[1]


class Ranks:
    """`config.tp` worker processes, from spawn to their end; leaving the context kills whatever is left of them."""

    def __init__(self, config: EngineConfig, command: Command = lambda _: WORKER) -> None:
        self.config = config
        sizes = {
            "plan": ring_bytes(config.tp, 1 << 20),
            "masks": ring_bytes(config.tp, 1 << 20),
            "result": ring_bytes(1, 1 << 20),
            "status": StatusBlock.size(config.tp + 1),
            "reduce": shared_bytes(config.tp),
            "store": 0,
        }
        shared = {name: create_shared(name, size) for name, size in sizes.items()}
        self.plans = RingWriter(map_shared(shared["plan"]), config.tp)
        self._masks = RingWriter(map_shared(shared["masks"]), config.tp)
        self._masked = 0
        self._results = RingReader(map_shared(shared["result"]), 1, 0)
        self._status = StatusBlock(map_shared(shared["status"]))
        self._hashes = [0] * config.tp
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lifelines: list[BootSocket] = []
        self._errors: list[IO[bytes]] = []
        try:
            for rank in range(config.tp):
                self._spawn(rank, shared, command(rank))
        except BaseException:
            self.kill()
            raise
        finally:
            for fd in shared.values():
                os.close(fd)

    def _spawn(self, rank: int, shared: dict[str, int], command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            args = BootArgs(
                role="rank",
                index=rank,
                tp=self.config.tp,
                parent=os.getpid(),
                lifeline=theirs.fileno(),
                status=shared["status"],
                plan=shared["plan"],
                masks=shared["masks"],
                result=shared["result"],
                reduce=shared["reduce"],
                store=f"/proc/self/fd/{shared['store']}",
            )
            errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
            process = subprocess.Popen(
                [sys.executable, *command, msgspec.json.encode(args).decode()],
                cwd=ROOT,
                env=environment(dict(os.environ), self.config.device),
                stdin=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(), *shared.values()),
            )
        ours.settimeout(BOOT_S)
        self.processes.append(process)
        self.lifelines.append(BootSocket(ours))
        self._errors.append(errors)

    def boot(self, pages: tuple[int, ...]) -> list[Loaded]:
        """The whole handshake."""
        self.send(Configure(self.config))
        loaded = [message for message in self.receive() if isinstance(message, Loaded)]
        assert len(loaded) == self.config.tp, self.stderr()
        self.send(Allocate(pages))
        assert all(isinstance(message, Ready) for message in self.receive()), self.stderr()
        return loaded

    def send(self, message: BootMessage) -> None:
        for lifeline in self.lifelines:
            lifeline.send(message)

    def receive(self) -> list[BootMessage]:
        """One message of each; a rank that ended or failed is an error."""
        messages = [lifeline.receive() for lifeline in self.lifelines]
        assert all(message is not None and not isinstance(message, Failed) for message in messages), (messages, self.stderr())
        return [message for message in messages if message is not None]

    def submit(self, plan: StepPlan, masks: bytes = b"") -> None:
        """A plan, and its masks if they are there already."""
        if masks:
            self.submit_masks(masks)
        self.plans.write(plan.step, encode_plan(plan))

    def submit_masks(self, masks: bytes) -> None:
        """The masks of the next masked step."""
        self._masked += 1
        self._masks.write(self._masked, masks)

    def result(self) -> StepResult:
        """The next result; AssertionError when it does not come or a rank ends."""
        deadline = time.monotonic() + STEP_S
        while (record := self._results.poll()) is None:
            self.alive(deadline)
        return decode_result(record[1])

    def hashes(self, step: int) -> list[int]:
        """Every rank's state hash, once all have finished `step`; nothing later may be submitted yet.

        A record's fields are written one after the other: a hash that is still zero, or the last one, is not there yet.
        """
        deadline = time.monotonic() + STEP_S
        while any(
            status.finished < step or status.state_hash in (0, old)
            for status, old in zip(self.statuses(), self._hashes, strict=True)
        ):
            self.alive(deadline)
        self._hashes = [status.state_hash for status in self.statuses()]
        return self._hashes

    def statuses(self) -> list[RankStatus]:
        return [self._status.read(rank) for rank in range(self.config.tp)]

    def alive(self, deadline: float) -> None:
        """One turn of waiting."""
        ended = [(rank, process.returncode) for rank, process in enumerate(self.processes) if process.poll() is not None]
        assert not ended, (ended, self.stderr())
        assert time.monotonic() < deadline, self.statuses()
        time.sleep(0.001)

    def wait(self, timeout_s: float = 10.0) -> list[int]:
        """Exit codes, once all have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.01, deadline - time.monotonic())) for process in self.processes]

    def stderr(self) -> list[str]:
        """What each rank wrote there so far."""
        texts = []
        for errors in self._errors:
            errors.seek(0)
            texts.append(errors.read().decode())
        return texts

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for lifeline in self.lifelines:
            lifeline.sock.close()
        for errors in self._errors:
            errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def single(config: EngineConfig) -> Rank:
    """A group of one in this process, loaded; `build(rank, pages)` makes runners of it."""
    return load(config, BootArgs(role="rank", index=0, tp=1, parent=0, lifeline=-1, status=-1, plan=-1, masks=-1, result=-1))


def run(runner: Runner, plan: StepPlan, masks: bytes = b"") -> StepResult:
    """One plan through its bytes, launched and finished."""
    return finish(runner.launch(encode_plan(plan), masks))


def finish(launched: Launched) -> StepResult:
    """The result of a launched step, which moves the runner's state hash."""
    result = decode_result(launched.result())
    launched.fold()
    return result
