"""A rank without a model: it speaks the handshake, follows the plan ring and answers 10, 11, 12, ... to each admission; no torch.

`python -m tests.support.engine.fake_child '<BootArgs>' '<Behaviour>'`. Beside the real core it makes a whole group that
boots in half a second; a Behaviour makes it misbehave at a chosen point.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from cluster.children import child_command, child_name
from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.errors import CheckpointError
from engine.lifeline import Allocate, BootArgs, Configure, Lifeline, Loaded, Ready, run
from engine.plan import ResultRow, StepPlan
from tests.support.engine.plans import decode_plan, encode_result, result_of

FIRST_TOKEN = 10
TOKENS = 40


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How a fake rank behaves.

    load     what it does instead of loading: "" (load), refuse (a CheckpointError), crash (a RuntimeError), full (the same, and no
             room where stderr goes), exit (code 7), hang, die (SIGKILL)
    stall    step before which it stops for ever, its heart beating (0: never)
    crash    step in which it raises (0: never)
    step_s   seconds a step takes
    first_token  the id that an answer begins with
    kv_bytes what it reports as left for KV pages
    fallbacks  what its checks found wrong
    """

    load: str = ""
    stall: int = 0
    crash: int = 0
    step_s: float = 0.001
    first_token: int = FIRST_TOKEN
    kv_bytes: int = 1 << 28
    fallbacks: tuple[str, ...] = ()


def commands(**odd: Behaviour) -> Callable[[BootArgs], list[str]]:
    """Command builder of a fake group: `rank_1=Behaviour(...)` makes that rank odd, `ranks=...` all others; the core is real."""
    usual = odd.pop("ranks", Behaviour())

    def command(args: BootArgs) -> list[str]:
        if args.name == "core":
            return child_command(args)
        behaviour = odd.get(child_name(args.index, args.tp).replace(" ", "_"), usual)
        behaves = msgspec.json.encode(behaviour).decode()
        return [sys.executable, "-m", "tests.support.engine.fake_child", child_command(args)[-1], behaves]

    return command


class FakeRank:
    """Follows the plans; rank 0 answers."""

    def __init__(self, lifeline: Lifeline, behaviour: Behaviour) -> None:
        args = lifeline.args
        self._lifeline = lifeline
        self._behaviour = behaviour
        self._plans = RingReader(map_shared(args.plan), args.tp, args.index)
        self._results = RingWriter(map_shared(args.result), 1) if args.index == 0 else None
        self._numbers: dict[int, int] = {}
        self._given: dict[int, int] = {}

    def run(self) -> None:
        """Until the stop plan."""
        waiter = Waiter(0, idle_s=0.0002)
        while True:
            record = self._plans.poll()
            if record is None:
                waiter.wait()
                continue
            waiter.reset()
            plan = decode_plan(record[1])
            if plan.stop:
                return
            self._step(plan)

    def _step(self, plan: StepPlan) -> None:
        self._progress(plan.step, plan.step - 1)
        if plan.step == self._behaviour.stall:
            time.sleep(3600)
        if plan.step == self._behaviour.crash:
            raise RuntimeError(f"planted in step {plan.step}")
        time.sleep(self._behaviour.step_s)
        rows = [self._row(slot) for slot in self._admitted(plan).result_slots]
        if self._results is not None:
            self._results.write(plan.step, encode_result(result_of(plan.step, rows)))
        self._progress(plan.step, plan.step)

    def _admitted(self, plan: StepPlan) -> StepPlan:
        for admission in plan.admissions:
            self._numbers[admission.slot] = admission.number
            self._given[admission.slot] = len(admission.tokens) - admission.prompt
        return plan

    def _row(self, slot: int) -> ResultRow:
        token = self._behaviour.first_token + self._given[slot] % TOKENS
        self._given[slot] += 1
        return ResultRow(slot, self._numbers[slot], (token,))

    def _progress(self, launched: int, finished: int) -> None:
        args = self._lifeline.args
        self._lifeline.status.progress(args.index, launched, finished, time.monotonic_ns(), 0)


def load(behaviour: Behaviour) -> None:
    """What the behaviour does instead of loading weights."""
    match behaviour.load:
        case "refuse":
            raise CheckpointError("model.layers.3.mlp.up_proj.weight is missing")
        case "crash" | "full":
            if behaviour.load == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stderr.fileno())
            raise RuntimeError("planted while loading")
        case "exit":
            os._exit(7)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)


def serve(lifeline: Lifeline, behaviour: Behaviour) -> None:
    """The handshake, then the plans."""
    lifeline.receive(Configure)
    load(behaviour)
    lifeline.send(Loaded(kv_bytes=behaviour.kv_bytes))
    lifeline.receive(Allocate)
    rank = FakeRank(lifeline, behaviour)
    lifeline.send(Ready(note="fake", fallbacks=behaviour.fallbacks))
    rank.run()


def main() -> None:
    """Entry point of the process."""
    run(lambda lifeline: serve(lifeline, msgspec.json.decode(sys.argv[2], type=Behaviour)))


if __name__ == "__main__":
    main()
