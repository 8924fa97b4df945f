"""Ranks for tests: real worker processes over descriptors of our own, or one rank in this process.

No core and no replica: the test writes the plans, reads the results, and plays the replica's part in the handshake.
"""

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Self

import msgspec
import torch

from cluster.children import environment
from engine.channel import RingReader, RingWriter, create_shared, map_shared, ring_bytes
from engine.config import EngineConfig
from engine.lifeline import Allocate, BootArgs, BootMessage, BootSocket, Configure, Failed, Loaded, Ready
from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.rank.builder import Rank, load_rank
from engine.rank.parallel import Single
from engine.rank.runner import Runner
from engine.rank.stages.report_stage import Launched
from engine.rank_status import STATUS_BYTES, RankStatus, StatusBlock
from kernels.allreduce import shared_bytes
from tests.support import forked
from tests.support.engine.media import MEMORY
from tests.support.repo_rules import ROOT

# Seconds of a phase of boot, and of a step. On GPUs kernels that nobody has compiled yet are compiled in them.
BOOT_S = {"cpu": 150.0, "cuda": 300.0}
STEP_S = {"cpu": 20.0, "cuda": 60.0}
SHOWN = 40  # lines of a rank's stderr
WORKER = ("-m", "engine.rank.worker")
Command = Callable[[int], Sequence[str]]  # rank -> python's arguments before argv[1]


class Ranks:
    """`config.tp` worker processes, from spawn to their end; leaving the context kills whatever is left of them."""

    def __init__(self, config: EngineConfig, command: Command = lambda _: WORKER, boot_s: float | None = None) -> None:
        self.config = config
        self._boot_s, self._step_s = boot_s or BOOT_S[config.device], STEP_S[config.device]
        sizes = {
            "plan": ring_bytes(config.tp, 1 << 20),
            "masks": ring_bytes(config.tp, 1 << 20),
            "result": ring_bytes(1, 1 << 20),
            "status": (config.tp + 1) * STATUS_BYTES,
            "reduce": shared_bytes(config.tp),
            "store": 0,
        }
        shared = {name: create_shared(name, size) for name, size in sizes.items()} | {"media": os.dup(MEMORY.fd)}
        self.plans = RingWriter(map_shared(shared["plan"]), config.tp)
        self._masks = RingWriter(map_shared(shared["masks"]), config.tp)
        self._masked = 0
        self._results = RingReader(map_shared(shared["result"]), 1, 0)
        self._status = StatusBlock(map_shared(shared["status"]))
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
                index=rank,
                tp=self.config.tp,
                parent=os.getpid(),
                lifeline=theirs.fileno(),
                status=shared["status"],
                plan=shared["plan"],
                masks=shared["masks"],
                media=shared["media"],
                result=shared["result"],
                reduce=shared["reduce"],
                front=-1,
                spin=0,
                store=f"/proc/self/fd/{shared['store']}",
            )
            errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
            process = (forked if self.config.device == "cpu" else subprocess).Popen(
                [sys.executable, *command, msgspec.json.encode(args).decode()],
                cwd=ROOT,
                env=environment(dict(os.environ), self.config.device),
                stdin=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(), *shared.values()),
            )
        ours.settimeout(self._boot_s)
        self.processes.append(process)
        self.lifelines.append(BootSocket(ours))
        self._errors.append(errors)

    def boot(self, pages: tuple[int, ...]) -> list[Loaded]:
        """The whole handshake."""
        self.send(Configure(self.config))
        loaded = [message for message in self.receive() if isinstance(message, Loaded)]
        assert len(loaded) == self.config.tp, self.report("no Loaded")
        self.send(Allocate(pages))
        assert all(isinstance(message, Ready) for message in self.receive()), self.report("no Ready")
        return loaded

    def send(self, message: BootMessage) -> None:
        for lifeline in self.lifelines:
            lifeline.send(message)

    def receive(self) -> list[BootMessage]:
        """One message of each; AssertionError when a rank fails, ends, or says nothing in time."""
        messages = {}
        deadline = time.monotonic() + self._boot_s
        while silent := [rank for rank in range(self.config.tp) if rank not in messages]:
            sockets = [self.lifelines[rank].sock for rank in silent]
            readable, _, _ = select.select(sockets, [], [], max(0.0, deadline - time.monotonic()))
            assert readable, self.report(f"nothing from ranks {silent} in {self._boot_s:g} s")
            for rank, sock in zip(silent, sockets, strict=True):
                if sock in readable:
                    message = self.lifelines[rank].receive()
                    assert message is not None, self.report(f"rank {rank} ended")
                    assert not isinstance(message, Failed), self.report(f"rank {rank} failed: {message.error}")
                    messages[rank] = message
        return [messages[rank] for rank in range(self.config.tp)]

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
        deadline = time.monotonic() + self._step_s
        while (record := self._results.poll()) is None:
            self.alive(deadline)
        return decode_result(record[1])

    def hashes(self, step: int) -> list[int]:
        """Every rank's state hash after `step`, which all are to finish."""
        deadline = time.monotonic() + self._step_s
        while any(status.finished < step for status in self.statuses()):
            self.alive(deadline)
        return [status.hashes[step] for status in self.statuses()]

    def statuses(self) -> list[RankStatus]:
        return [self._status.read(rank) for rank in range(self.config.tp)]

    def alive(self, deadline: float) -> None:
        """One turn of waiting."""
        ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
        assert not ended, self.report(f"ranks {ended} ended")
        assert time.monotonic() < deadline, self.report(f"a step is not done in {self._step_s:g} s")
        time.sleep(0.001)

    def wait(self, timeout_s: float = 10.0) -> list[int]:
        """Exit codes, once all have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.01, deadline - time.monotonic())) for process in self.processes]

    def stderr(self) -> list[str]:
        """What each rank wrote there so far. By pread: a rank writes where the file's offset stands, which it shares with us."""
        files = [errors.fileno() for errors in self._errors]
        return [os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace") for fd in files]

    def report(self, what: str) -> str:
        """What happened, and where each rank stands: exit code, status, the last lines of what it wrote."""
        lines = [what]
        for rank, (process, status, text) in enumerate(zip(self.processes, self.statuses(), self.stderr(), strict=True)):
            lines.append(f"rank {rank}: exit code {process.poll()}, {status}")
            lines += [f"    {line}" for line in text.splitlines()[-SHOWN:]]
        return "\n".join(lines)

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

    def __exit__(self, *_: object) -> None:
        self.kill()


def single(config: EngineConfig) -> Rank:
    """A group of one in this process, loaded; `build(rank, pages)` makes runners of it."""
    return load_rank(config, Single(), torch.device(config.device), media=MEMORY.fd)


def run(runner: Runner, plan: StepPlan, masks: bytes = b"") -> StepResult:
    """One plan through its bytes, launched and finished."""
    launched = runner.launch(encode_plan(plan), masks)
    while runner.encode_stage.advance():
        pass
    return finish(launched)


def finish(launched: Launched) -> StepResult:
    """The result of a launched step, which moves the runner's state hash."""
    result = decode_result(launched.result())
    launched.fold()
    return result
