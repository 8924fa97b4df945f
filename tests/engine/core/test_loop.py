"""The core's loop over a socket pair, with the KV machine as its ranks."""

import logging
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from engine.channel import Waiter
from engine.core.links import FrontLink
from engine.core.loop import Core, StepLog
from engine.core.scheduler import Scheduler
from engine.matcher import Matcher, Vocabulary
from engine.pieces import Pieces
from engine.plan import StepPlan, StepResult
from engine.protocol import (
    AbortReason,
    Control,
    FinishReason,
    Grammar,
    Output,
    PoolLoad,
    SamplingParams,
    TokenBatch,
    encode_message,
)
from engine.step_masks import decode_masks
from tests.support.engine.core_loop import Front, StatusOnly, running
from tests.support.engine.kvmachine import KVMachine, Model
from tests.support.engine.load_figures import load
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

pytestmark = [pytest.mark.pure, pytest.mark.alone]

CONFIG = SchedulerConfig(two_groups(), (20, 40), 4, 64, 16, prefix_cache=True)


@dataclass
class MachineExecutor:
    """The KV machine behind the core's interface; answers one plan a poll, and none while `held`."""

    model: Model = lambda prefix, position, seed: position
    deepest: int = 0
    masks: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = KVMachine(CONFIG.groups, CONFIG.pages, CONFIG.max_seqs, CONFIG.max_len, self.model)

    def submit(self, plan: StepPlan) -> None:
        if not plan.stop:
            self.machine.submit(plan)
            self.deepest = max(self.deepest, len(self.machine.queue))

    def submit_masks(self, masks: bytes) -> None:
        self.masks.append(masks)

    def poll(self) -> StepResult | None:
        """A masked step has no result before its masks come."""
        queue = self.machine.queue
        if not queue or (queue[0].masked and not self.masks):
            return None
        if queue[0].masked:
            assert decode_masks(self.masks.pop(0)).step == queue[0].step
        return self.machine.result()


@dataclass
class StoppingExecutor(MachineExecutor):
    """The front says stop once there is plan `last`."""

    front: Front | None = None
    last: int = 1

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if self.front is not None and plan.step == self.last:
            self.front.send(Control(action="stop"))


def loop_of(scheduler: Scheduler, executor: MachineExecutor, sock: socket.socket, vocabulary: Any = None) -> Core:
    return Core(scheduler, executor, FrontLink(sock), StatusOnly(), Waiter(), vocabulary)


@pytest.fixture
def core():  # noqa: ANN201
    """A running core: (front, executor, scheduler); stopped and joined afterwards."""
    scheduler, executor = scheduler_of(CONFIG), MachineExecutor()
    with running(lambda sock: loop_of(scheduler, executor, sock)) as front:
        yield front, executor, scheduler


def test_requests_stream_to_their_ends(core) -> None:  # noqa: ANN001
    """Tokens of concurrent requests come in order, each request ends once, and two plans were out at a time."""
    front, executor, _ = core
    for number in range(6):
        front.send(request_of(number, [1] * (3 + number), 12))
    outputs = front.until_ended(6)
    for number in range(6):
        tokens = [token for output in outputs if output.id == number for token in output.tokens]
        assert tokens == list(range(3 + number, 15 + number))
    assert executor.deepest == 2


def test_the_loop_says_what_it_does(core, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """What the steps of a time did, with queue and both pools."""
    front, _, _ = core
    monkeypatch.setattr("engine.core.loop.LOG_PERIOD_S", 0.0)
    with caplog.at_level(logging.INFO, "engine.core.loop"):
        front.send(request_of(0, [1] * 5, 3))
        front.until_ended(1)
        front.send(Control(action="report"))
        front.hear()
    line = r"\d\.\d s: \d steps, prefill 0, decode \d; cached 0, running 0, waiting 0, preempted 0, pages \w+ 0\+1 of 19, full .*"
    assert any(re.fullmatch(line, record.getMessage()) for record in caplog.records)


def test_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """Once a second, if steps have ended: how many, their tokens, cached tokens, queue, pools, preemptions since the last."""
    pools = [PoolLoad(group="full", total=90, used=7, cached=5)]
    first = {"hit_tokens": 64, "prefill_tokens": 42, "preemptions": 1}
    loads = iter((
        load(0, pools),
        load(4, pools, decode_tokens=8, running=3, waiting=2, **first),
        load(4, pools, decode_tokens=8, **first),
        load(5, pools, decode_tokens=11, running=3, **first),
    ))  # fmt: skip
    log = StepLog(lambda: next(loads), 10.0)
    with caplog.at_level(logging.INFO):
        for at in (10.9, 11.0, 11.9, 12.0, 12.9, 13.5):
            log.report(at)
    assert [record.getMessage() for record in caplog.records] == [
        "1.0 s: 4 steps, prefill 42, decode 8; cached 64, running 3, waiting 2, preempted 1, pages full 7+5 of 90",
        "1.5 s: 1 steps, prefill 0, decode 3; cached 0, running 3, waiting 0, preempted 0, pages full 7+5 of 90",
    ]


def test_an_unreadable_message_fails_its_own_request_only(core) -> None:  # noqa: ANN001
    """A message that does not decode is refused by id; the request beside it is served."""
    front, _, scheduler = core
    front.send({"type": "generate", "id": 7, "prompt": "not a list"})
    front.send(request_of(8, [1, 2], 2))
    outputs = front.until_ended(2)
    assert [(output.id, output.invalid) for output in outputs if output.finish] == [(7, True), (8, False)]
    assert outputs[-1].finish is FinishReason.length
    assert (scheduler.requests.counters.received, scheduler.requests.counters.refused) == (2, 1)


def unread(link: FrontLink, batches: int) -> int:
    """How many of so many batches a front that reads nothing is sent before the link gives up."""
    batch = TokenBatch(outputs=[Output(id=1, tokens=[7] * 1000)], load=load())
    for sent in range(batches):
        try:
            link.send(batch)
        except BufferError:
            return sent
    return batches


def test_a_front_that_never_reads_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a front leaves unread is bounded: sending never blocks, and beyond the bound it raises; without one it never would."""
    monkeypatch.setattr("engine.core.links.MAX_UNSENT_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    assert unread(FrontLink(theirs), 5000) < 5000
    monkeypatch.setattr("engine.core.links.MAX_UNSENT_BYTES", 1 << 40)
    assert unread(FrontLink(theirs), 5000) == 5000
    ours.close()
    theirs.close()


def test_what_a_front_left_unread_goes_out_when_it_reads() -> None:
    """A core that has nothing to do but unsent answers sends them as the socket takes them, in order and whole."""
    ours, theirs = socket.socketpair()
    link, front = FrontLink(theirs), Front(ours)
    for number in range(500):
        link.send(TokenBatch(outputs=[Output(id=number, tokens=[7] * 1000, finish=FinishReason.length)], load=load()))
    reader = threading.Thread(target=lambda: got.extend(front.until_ended(500)))
    got = []
    reader.start()
    while reader.is_alive():
        assert link.receive(0.1) == []
    assert [output.id for output in got] == list(range(500))
    ours.close()
    theirs.close()


def left_by_a_front(unread: bool) -> socket.socket:
    """The core's end of a socket whose front has said something and closed it; `unread`: with an answer unread."""
    ours, theirs = socket.socketpair()
    Front(ours).send(Control(action="report"))
    if unread:
        theirs.sendall(b"an answer")
    ours.close()
    return theirs


@pytest.mark.parametrize("unread", [False, True])
def test_a_front_that_leaves_is_an_end_of_file(unread: bool) -> None:
    """Whatever it left unread: what it said is heard, and then both directions raise ConnectionError, which ends the core in order.

    Planted: the bare socket, which is reset when something is unread, and cannot be written to.
    """
    batch = TokenBatch(outputs=[], load=load())
    with left_by_a_front(unread) as sock:
        link = FrontLink(sock)
        assert len(link.receive(1.0)) == 1
        for use in (lambda: link.receive(1.0), lambda: link.send(batch), lambda: link.receive(1.0)):
            with pytest.raises(ConnectionError):
                use()
    with left_by_a_front(unread) as sock, pytest.raises(ConnectionError):
        FrontLink(sock).send(batch)
    with left_by_a_front(unread) as sock:
        sock.recv(100)
        if unread:
            with pytest.raises(ConnectionResetError):
                sock.recv(100)
        with pytest.raises(BrokenPipeError):
            sock.send(b"more")


def test_long_prompts_come_one_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several long prompts that have come at once the loop takes in one between two plans; short ones all together. None is
    lost. Planted fault: without a bound it takes all."""
    lengths = [140_000, 140_000, *[3] * 50, 140_000]
    messages = [encode_message(request_of(at, [1] * length, 2)) for at, length in enumerate(lengths)]

    def turns() -> list[list[int]]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            scheduler = scheduler_of(CONFIG)
            loop = loop_of(scheduler, MachineExecutor(), theirs)
            loop._unread.extend(messages)
            received = [0]
            while received[-1] < len(lengths):
                loop._read()
                received.append(scheduler.requests.counters.received)
        return [lengths[before:after] for before, after in pairwise(received)]

    assert turns() == [[140_000], [140_000], [*[3] * 50, 140_000]]
    monkeypatch.setattr("engine.core.loop._TURN_BYTES", 1 << 40)
    assert turns() == [lengths]


def test_a_long_prompt_is_taken_in_soon() -> None:
    """One of 128k tokens holds up the steps of others for a few milliseconds of CPU (the least of five: a busy neighbour only adds;
    the bound is several times what it is: a machine may be a third as fast)."""
    scheduler = scheduler_of(SchedulerConfig(two_groups(1024, 32), (2000, 40_000), 8, 131_200, 8192, prefix_cache=True))
    ours, theirs = socket.socketpair()
    milliseconds = []
    with ours, theirs:
        loop = loop_of(scheduler, MachineExecutor(), theirs)
        for number in range(5):
            loop._unread.append(encode_message(request_of(number, range(number, number + 131_072))))
            began = time.thread_time()
            loop._read()
            assert scheduler.schedule() is not None
            milliseconds.append(1e3 * (time.thread_time() - began))
    print(f"128k taken in: {milliseconds} ms")
    assert len(scheduler.requests.unfinished) == 5
    assert min(milliseconds) < 30


def test_an_idle_core_sleeps(core, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """With nothing to do, and with requests that only wait for the host, the loop blocks on its socket and does not spin. Planted:
    one that is never idle."""
    front, _, scheduler = core
    waits = []
    receive = FrontLink.receive
    monkeypatch.setattr(FrontLink, "receive", lambda link, timeout_s: waits.append(timeout_s) or receive(link, timeout_s))

    def next_wait() -> float:
        """For how long the loop would wait for the front's next word when it has answered one."""
        front.send(Control(action="report"))
        front.hear()
        before = len(waits)
        while len(waits) == before:
            time.sleep(0.001)
        return waits[-1]

    assert next_wait() == 1.0
    scheduler.requests.add(request_of(1, [1], 2))
    scheduler.requests.waiting[0].waits.add("mask")
    assert next_wait() == 1.0
    monkeypatch.setattr(Core, "_idle", property(lambda core: False, lambda core, idle: None), raising=False)
    assert next_wait() == 0
    scheduler.requests.abort(1, AbortReason.client_gone)


LETTERS = Vocabulary(Pieces((b"a", b"b", b"<end>"), frozenset({2})), [2], 3)


def always_b(prefix: int, position: int, seed: int) -> int:
    return 1


def test_a_grammar_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose grammar is compiled beside the loop begins when that is done, though nobody says a word; one that cannot be
    compiled is an error."""

    def slow(self: Vocabulary, grammar: str) -> Matcher:
        time.sleep(0.2)
        return matcher_of(self, grammar)

    matcher_of = Vocabulary.matcher
    monkeypatch.setattr(Vocabulary, "matcher", slow)
    executor = MachineExecutor(always_b)
    with running(lambda sock: loop_of(scheduler_of(CONFIG), executor, sock, vocabulary=LETTERS)) as front:
        for number, rules in enumerate((Grammar("start: /b+/"), Grammar("start: nothing"))):
            front.send(request_of(number, [0], SamplingParams(max_tokens=3, grammar=rules)))
        outputs = front.until_ended(2)
    assert [token for output in outputs if output.id == 0 for token in output.tokens] == [1, 1, 1]
    assert next(output.error for output in outputs if output.id == 1 and output.finish is FinishReason.error)


def test_a_stop_gives_masks_to_the_steps_that_are_out() -> None:
    """Ranks finish what they have begun: a step whose masks would come of a token that nobody waits for gets an empty record."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        front = Front(ours)
        executor = StoppingExecutor(always_b, front=front, last=2)
        front.send(request_of(1, [0], SamplingParams(max_tokens=9, grammar=Grammar("start: /b+/"))))
        loop_of(scheduler_of(CONFIG), executor, theirs, vocabulary=LETTERS).run()
    assert [plan.step for plan in executor.machine.queue if plan.masked] == [1, 2]
    assert [(masks.step, len(masks.slots)) for masks in map(decode_masks, executor.masks)] == [(1, 1), (2, 0)]
