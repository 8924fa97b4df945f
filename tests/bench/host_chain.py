"""From a result to the next plan: `python -m tests.bench.host_chain [--record MACHINE]`.

The real core in its own process, over its own rings and socket; this process plays rank 0 and the replica. As on a device, two
plans are out: with step n's result published step n + 1 begins, and the core has that step's time to make plan n + 2. Measured are
the microseconds from the publication of result n to the rank's receipt of plan n + 2.

31B geometry at TP=4, every sequence decoding behind 1100 tokens. The median and the tenth percentile: whatever else runs on the
machine only ever adds.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median, quantiles

import msgspec
import numpy as np

from cluster.children import environment
from deploy.models.resolve import resolve
from engine.channel import RingReader, RingWriter, create_shared, map_shared, ring_bytes
from engine.config import EngineConfig, engine_config
from engine.lifeline import Allocate, BootArgs, BootSocket, Configure, RanksReady, Ready
from engine.plan import NUMBER_MASK, encode_rows, read_plan
from engine.protocol import FrameReader, GenerateRequest, SamplingParams, decode_token_batch, encode_message, frame, pack_tokens
from engine.rank_status import StatusBlock
from tests.bench.record import Row, append

PROMPT, TOKENS = 1100, 900


class CoreProcess:
    """A core that this process boots. plans, results: the rank's ends of its rings; front: the replica's end of its socket."""

    def __init__(self, config: EngineConfig, pages: tuple[int, int]) -> None:
        shared = {name: create_shared(name, ring_bytes(1)) for name in ("plan", "result", "masks")}
        shared["status"] = create_shared("status", StatusBlock.size(2))
        (lifeline, theirs), (self.front, front) = socket.socketpair(), socket.socketpair()
        args = BootArgs(
            role="core", index=0, tp=1, parent=os.getpid(), lifeline=theirs.fileno(), front=front.fileno(), spin=200, **shared
        )
        command = [sys.executable, "-m", "engine.core.loop", msgspec.json.encode(args).decode()]
        descriptors = (theirs.fileno(), front.fileno(), *shared.values())
        self.process = subprocess.Popen(command, env=environment(dict(os.environ), "cpu"), pass_fds=descriptors)
        self.plans = RingReader(map_shared(shared["plan"]), 1, 0)
        self.results = RingWriter(map_shared(shared["result"]), 1)
        self._boot = BootSocket(lifeline)
        for message in (Configure(config), Allocate(pages), RanksReady()):
            self._boot.send(message)
        assert isinstance(self._boot.receive(), Ready)
        theirs.close()
        front.close()
        self.front.setblocking(False)
        self._frames = FrameReader()

    def read(self) -> int:
        """Take in what the core has told; tokens in it."""
        try:
            data = self.front.recv(1 << 20)
        except BlockingIOError:
            return 0
        batches = [decode_token_batch(raw) for raw in self._frames.feed(data)]
        return sum(len(output.tokens) for batch in batches for output in batch.outputs)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.front.close()
        self._boot.sock.close()


class StandInRank:
    """Answers plans: one token a row, never a stop id."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._numbers = np.zeros(1024, np.int64)
        self._answers: list[tuple[int, bytes]] = []

    def wait(self) -> float:
        """Take the next plan; when it had been read. AssertionError after ten seconds."""
        deadline = time.monotonic() + 10
        while (record := self._core.plans.poll()) is None:
            assert time.monotonic() < deadline, "no plan came"
        now = time.perf_counter()
        plan = read_plan(record[1])
        for admission in plan.admissions:
            self._numbers[admission.slot] = admission.number & NUMBER_MASK
        slots = plan.result_slots
        table = np.zeros((len(slots), 5), np.int32)
        table[:, 0], table[:, 1], table[:, 2], table[:, 4] = slots, self._numbers[slots], 1, 1000
        self._answers.append((plan.step, encode_rows(plan.step, table, {})))
        return now

    def publish(self) -> float:
        """Publish the oldest plan's result; when that was done."""
        self._core.results.write(*self._answers.pop(0))
        return time.perf_counter()


@dataclass(frozen=True)
class Chain:
    """Microseconds."""

    median: float
    low: float


def measure(config: EngineConfig, sequences: int, steps: int, step_s: float) -> Chain:
    """Steps in which all sequences decode."""
    core = CoreProcess(config, (sequences * 40 + 300, sequences * 64 + 200))
    try:
        for number in range(sequences):
            prompt = pack_tokens(5 + (number + at) % 1000 for at in range(PROMPT))
            request = GenerateRequest(id=number, prompt=prompt, params=SamplingParams(max_tokens=TOKENS, stop_ids=(1, 106)))
            core.front.setblocking(True)
            core.front.sendall(frame(encode_message(request)))
        core.front.setblocking(False)
        rank, started = StandInRank(core), 0
        rank.wait()
        while started < 2 * sequences:  # until all decode; with a chunk a step few tokens come
            rank.wait()
            rank.publish()
            started += core.read()
        rank.wait()  # two are out
        found = []
        for _ in range(steps):
            time.sleep(step_s)
            core.read()
            published = rank.publish()
            found.append(1e6 * (rank.wait() - published))
    finally:
        core.close()
    return Chain(median(found), quantiles(found, n=10)[0])


def main() -> None:
    """A line a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 100, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step takes the device")
    parser.add_argument("--record", metavar="MACHINE", help="append to results.csv under this machine's name")
    args = parser.parse_args()
    rows: list[Row] = []
    for sequences in args.sequences:
        config = engine_config(
            model=str(resolve("dummy:31b")), tp=4, device="cuda", load_format="dummy", max_len=4096, prefill_budget=2048,
            max_seqs=sequences, core_log="warning",
        )  # fmt: skip
        found = measure(config, sequences, args.steps, args.step_ms / 1e3)
        print(f"{sequences} sequences: {found.median:.0f} us (tenth percentile {found.low:.0f})")
        case = f"host-chain-b{sequences}"
        rows.append((case, "result in the ring to next plan out of it, median", found.median, "us"))
        rows.append((case, "result in the ring to next plan out of it, tenth percentile", found.low, "us"))
    if args.record:
        append(rows, args.record, "tests.bench.host_chain")


if __name__ == "__main__":
    main()
