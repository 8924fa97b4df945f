"""The core process, `python -m engine.core.loop '<BootArgs>'`.

At most two plans are in flight: one running, one queued. It polls while plans are in flight or
threads make masks, else it sleeps on the front's socket. An exception ends the group, except for a
message that cannot be decoded.
"""

import gc
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.channel import Waiter
from engine.config import EngineConfig
from engine.core.links import FrontLink, RingExecutor
from engine.core.masks import Masks
from engine.core.requests import Requests
from engine.core.scheduler import Scheduler
from engine.errors import CheckpointError
from engine.kv_events import KvPublisher
from engine.lifeline import Allocate, Configure, Lifeline, RanksReady, Ready, StepTimes, run
from engine.matcher import Vocabulary
from engine.plan import DEPTH, StepPlan
from engine.protocol import (
    Abort,
    AdapterChange,
    Control,
    FrontMessage,
    GenerateRequest,
    Load,
    MediaEnd,
    TokenBatch,
    decode_front_message,
)

logger = logging.getLogger(__name__)
LOG_PERIOD_S = 1.0
_TURN_BYTES = 1 << 19  # of messages between two plans: page keys of a prompt of 128k tokens take some 3 ms


class Intake:
    def __init__(self, requests: Requests, masks: Masks) -> None:
        self._requests = requests
        self._masks = masks

    def add(self, request: GenerateRequest) -> None:
        params = request.params
        needs_masks = params.grammar is not None or params.thought is not None
        if needs_masks and not self._masks.available:
            self._requests.refuse(request.id, "grammars are not available: the checkpoint has no tokenizer to make them for")
            return
        sequence = self._requests.add(request)
        if sequence is not None:
            self._masks.add(sequence)


class Core:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: RingExecutor,
        link: FrontLink,
        lifeline: Lifeline,
        waiter: Waiter,
        vocabulary: Vocabulary | None,
        publisher: KvPublisher | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = scheduler.requests
        self._masks = Masks(scheduler.requests, vocabulary, scheduler.config.widest)
        self._intake = Intake(scheduler.requests, self._masks)
        self._executor = executor
        self._link = link
        self._lifeline = lifeline
        self._waiter = waiter
        self._unread: deque[bytes] = deque()
        self._stopping = False
        self._report = False
        self._publisher = publisher
        self._log = StepLog(scheduler.load, time.monotonic())
        self._idle = True  # nothing to do until the front sends something

    def run(self) -> None:
        while not self._stopping:
            committed = self._commit()
            planned = self._plan()  # before the front is sent to and read from: ranks wait for plans
            self._send()
            self._log.report(time.monotonic())
            waits = self._scheduler.in_flight or self._masks.making or self._requests.media.unused
            self._idle = not (planned or committed or waits)
            received = self._read()
            if self._requests.media.unused and (pages := self._requests.media.next_free(self._executor.encodes_read)):
                self._executor.free_media(pages)
            if planned or committed or received:
                self._waiter.reset()
            elif waits:
                self._waiter.wait()
        for masks in self._masks.discard():
            self._executor.submit_masks(masks)
        self._executor.submit(StepPlan(step=self._scheduler.planned + 1, stop=True))

    def _read(self) -> bool:
        """Returns whether a message came; when idle, sleeps on the socket."""
        if not self._unread:
            self._unread.extend(self._link.receive(1.0 if self._idle else 0))
        size = 0
        while self._unread and size < _TURN_BYTES:
            raw = self._unread.popleft()
            size += len(raw)
            try:
                self._handle(decode_front_message(raw))
            except msgspec.DecodeError as error:  # fails its own request only
                request = msgspec.msgpack.decode(raw, type=_Identified)
                self._requests.refuse(request.id, f"the request could not be read: {error}")
        return size > 0

    def _handle(self, message: FrontMessage) -> None:
        match message:
            case GenerateRequest():
                self._intake.add(message)
            case MediaEnd():
                self._requests.media.end(message)
            case Abort():
                self._requests.abort(message.id, message.reason)
            case AdapterChange():
                self._change_adapter(message)
            case Control(action="stop"):
                self._stopping = True
            case Control():
                self._report = True

    def _change_adapter(self, change: AdapterChange) -> None:
        adapters = self._requests.adapters
        match change.action:
            case "add":
                adapters.add(change.id)
            case "placed":
                adapters.placed(change.id)
            case "remove":
                adapters.remove(change.id)

    def _plan(self) -> bool:
        planned = False
        if self._masks.making:
            self._advance_masks()
        while self._scheduler.in_flight < DEPTH and (plan := self._scheduler.schedule()) is not None:
            if plan.masked:
                self._masks.planned(plan)
                self._send_masks()
            self._executor.submit(plan)
            self._report |= bool(plan.admissions)  # the front learns of admissions at once
            self._progress()
            planned = True
        if self._scheduler.stuck:
            raise RuntimeError(f"{len(self._requests.unfinished)} requests wait, but none can run: {self._scheduler.load()}")
        return planned

    def _commit(self) -> bool:
        committed = False
        while (result := self._executor.poll()) is not None:
            self._scheduler.commit(result)
            self._advance_masks()
            self._progress()
            committed = True
        return committed

    def _advance_masks(self) -> None:
        """Ranks wait for the masks of a step they have started."""
        self._masks.advance()
        self._send_masks()

    def _send_masks(self) -> None:
        for masks in self._masks.due():
            self._executor.submit_masks(masks)

    def _progress(self) -> None:
        planned = self._scheduler.planned
        committed = planned - self._scheduler.in_flight
        self._lifeline.status.progress(self._lifeline.args.index, planned, committed, time.monotonic_ns(), 0)

    def _send(self) -> None:
        outputs = self._requests.drain()
        started = self._requests.drain_started()
        orders = self._requests.adapter_orders()
        if outputs or started or orders or self._report:
            self._report = False
            self._link.send(TokenBatch(outputs=outputs, started=started, adapters=orders, load=self._scheduler.load()))
        if self._publisher is not None:
            self._publisher.publish()


class StepLog:
    def __init__(self, load: Callable[[], Load], now: float) -> None:
        self._load = load
        self._last, self._at = load(), now  # of the last report

    def report(self, now: float) -> None:
        if now - self._at < LOG_PERIOD_S:
            return
        load = self._load()
        last = self._last
        if load.step > last.step:
            prefill = load.prefill_tokens - last.prefill_tokens
            decode = load.decode_tokens - last.decode_tokens
            steps = f"{load.step - last.step} steps, prefill {prefill}, decode {decode}; cached {load.hit_tokens - last.hit_tokens}"
            queue = f"running {load.running}, waiting {load.waiting}, preempted {load.preemptions - last.preemptions}"
            pools = ", ".join(f"{pool.group} {pool.used}+{pool.cached} of {pool.total}" for pool in load.pools)
            logger.info("%.1f s: %s, %s, pages %s", now - self._at, steps, queue, pools)
        self._last = load
        self._at = now


class _Identified(msgspec.Struct):
    id: int


def make_scheduler(config: EngineConfig, pages: tuple[int, ...], times: StepTimes | None = None) -> Scheduler:
    return Scheduler(config, config.kv_groups, pages, times, config.media)


def collect_rarely() -> None:
    """A collection over every sequence and prefix would delay all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def read_vocabulary(config: EngineConfig) -> Vocabulary | None:
    """None without a tokenizer or stop token: grammars are refused."""
    try:
        return Vocabulary.read(Path(config.model))
    except CheckpointError as error:
        logger.warning("requests with a grammar will be refused: %s", error)
        return None


def serve(lifeline: Lifeline) -> None:
    args = lifeline.args
    config = lifeline.receive(Configure).config
    logging.basicConfig(stream=sys.stderr, format="core: %(message)s", level=logging.INFO)
    executor = RingExecutor(args, lifeline.status)
    link = FrontLink(socket.socket(fileno=args.front))
    vocabulary = read_vocabulary(config)  # while the ranks load their weights
    scheduler = make_scheduler(config, lifeline.receive(Allocate).pages, lifeline.receive(RanksReady).step_times)
    publisher = None
    if scheduler.cache_events is not None:
        publisher = KvPublisher(scheduler.cache_events, config.kv_events.endpoint or "", config.kv_events.topic)
    collect_rarely()
    lifeline.send(Ready())
    try:
        Core(scheduler, executor, link, lifeline, Waiter(args.spin, idle_s=200e-6), vocabulary, publisher).run()
    except ConnectionError:
        return


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
