"""A rank's process: plans in, results out. `python -m engine.rank.worker '<BootArgs>'`.

    boot   Configure -> geometry, group, kernel checks, model, weights -> Loaded; rank 0 has processes compile meanwhile
           Allocate -> KV cache, self-check, compilation, graph capture, step times -> Ready
    loop   publish finished steps; launch plans, up to two. With two launched, wait for the older one; with one, poll its end and
           the plan ring, or the device would idle after every second step
    masks  a plan with masked rows launches its forward at once, and samples when its masks come
"""

import gc
import socket
import time
from collections import deque

import torch

from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.lifeline import Allocate, BootArgs, Configure, Lifeline, Loaded, Ready, run
from engine.plan import DEPTH, read_header, with_time
from engine.rank import compile_ahead
from engine.rank.adapter_loader import AdapterLoader
from engine.rank.builder import Rank, build, kv_bytes, load_rank
from engine.rank.parallel import check_own_rows, connect, self_check
from engine.rank.runner import Runner
from engine.rank.stages.forward_stage import Forwarded
from engine.rank.stages.report_stage import Launched
from engine.rank.start_checks import residual_rms
from engine.rank.step_times import measure
from kernels import launch
from kernels.allreduce import MappedCollectives
from kernels.precompile import set_cache_keys

IDLE_S = 200e-6


def load(config: EngineConfig, args: BootArgs) -> Rank:
    if config.device == "cuda":
        device = torch.device("cuda", args.index)
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # of steps, before encoders' kernels
    parallel = connect(args.index, args.tp, device, args.reduce, args.store, config.boot_timeout_s)
    return load_rank(config, parallel, device, media=args.media)


def boot(lifeline: Lifeline) -> Runner:
    """An exception ends the group."""
    try:
        return _boot(lifeline)
    except torch.OutOfMemoryError as error:
        advice = "raise tp, or lower memory_fraction, max_seqs or prefill_budget"
        raise ConfigError(f"the GPU has too little memory to start with these settings: {advice}; {error}") from error


def _boot(lifeline: Lifeline) -> Runner:
    started = time.monotonic()
    config = lifeline.receive(Configure).config
    if config.device == "cuda":
        set_cache_keys()
    if config.device == "cuda" and lifeline.args.index == 0:
        compilers = compile_ahead.start(config)
    else:
        compilers = []
    rank = load(config, lifeline.args)
    rms = residual_rms(rank.model, config.kv_groups)
    seconds = time.monotonic() - started
    torch.set_num_threads(1)  # woken ones took 6 ms to copy a picture of 1.8 MB, between steps
    lifeline.send(Loaded(kv_bytes=kv_bytes(rank)))
    runner = build(rank, lifeline.receive(Allocate).pages)
    self_check(rank.parallel, rank.device, rank.model.dtype)
    wait_at_most(rank, config.boot_timeout_s)  # another rank's compiler may take long
    if rank.inboxes is not None and rank.inboxes.sequence is not None:
        check_own_rows(rank.parallel, rank.inboxes.sequence, rank.model.dtype)
    if rank.device.type == "cuda":
        runner.warm()
    if runner.capturable:
        runner.capture()
    compile_ahead.end(compilers)
    times = measure(runner, config, rank.geometry.vocab) if config.measures_steps or len(config.drafts) > 1 else None
    launch.ready()
    gc.collect()
    gc.freeze()
    gc.disable()  # a step makes no cycles, and a collection would hold up every rank
    wait_at_most(rank, config.step_timeout_s)
    if rank.adapters is not None and lifeline.args.adapters >= 0:
        AdapterLoader(rank.adapters, socket.socket(fileno=lifeline.args.adapters), lifeline.fail).start()
    if rank.geometry.tied:
        head = ""
    else:
        head = " with a head of their own"
    note = f"{rank.weight_bytes / 1e9:.2f} GB of weights{head}, residual rms {rms:.2f}, {seconds:.1f} s"
    lifeline.send(Ready(note=note, step_times=times, fallbacks=rank.fallbacks))
    return runner


def wait_at_most(rank: Rank, seconds: float) -> None:
    if isinstance(rank.parallel, MappedCollectives):
        rank.parallel.timeout_s = seconds
    if rank.inboxes is not None:
        rank.inboxes.allreduce.wait_at_most(seconds)


class Worker:
    def __init__(self, runner: Runner, lifeline: Lifeline) -> None:
        args = lifeline.args
        self._runner = runner
        self._lifeline = lifeline
        self._index = args.index
        self._plans = RingReader(map_shared(args.plan), args.tp, args.index)
        self._masks = RingReader(map_shared(args.masks), args.tp, args.index)
        self._results = RingWriter(map_shared(args.result), 1) if args.index == 0 else None
        self._waiter = Waiter(args.spin, idle_s=IDLE_S)
        self._launched: deque[Launched] = deque()
        self._forwarded: Forwarded | None = None  # a step that waits for its masks
        self._last_step = 0  # launched, or at least its forward

    def run(self) -> None:
        running = True
        while running or self._launched:
            finished = False
            while self._launched and self._launched[0].done:
                self._finish()
                finished = True
            if self._forwarded is not None:
                progressed = self._sample()
            elif running and len(self._launched) < DEPTH and (record := self._plans.poll()) is not None:
                progressed = True
                running = self._launch(*record)
            else:
                progressed = False
            if self._runner.encode_stage.advance() or progressed:
                self._waiter.reset()
                self._lifeline.status.read_encodes(self._index, self._runner.encode_stage.read)
            elif len(self._launched) == DEPTH or (self._launched and not running):
                self._finish()
            elif not finished:
                self._waiter.wait()

    def _launch(self, step: int, data: bytes) -> bool:
        """Start a step, or only its forward if it needs masks; False for a stop plan."""
        stop, masked = read_header(data)
        if stop:
            return False
        self._last_step = step
        self._progress(step - 1 - len(self._launched))  # before: on the CPU the launch is the step, and a hang shows as no progress
        if masked:
            self._forwarded = self._runner.forward(data)
        else:
            self._launched.append(self._runner.launch(data))
        return True

    def _sample(self) -> bool:
        """Sample the step that waits for masks, if they have come. The replica bounds the wait
        (`step_timeout_s`)."""
        record = self._masks.poll()
        if record is None:
            return False
        assert self._forwarded is not None
        self._launched.append(self._runner.sample(self._forwarded, record[1]))
        self._forwarded = None
        return True

    def _finish(self) -> None:
        launched = self._launched.popleft()
        result = launched.result()
        if self._results is not None:
            self._results.write(launched.step, with_time(result, launched.idle_us + launched.busy_us))
        launched.fold()
        self._progress(launched.step)
        status = self._lifeline.status
        status.device(self._index, launched.busy_us, launched.idle_us, launch.late_compilations())
        status.encoder(self._index, self._runner.encode_stage.figures)

    def _progress(self, finished: int) -> None:
        self._lifeline.status.progress(self._index, self._last_step, finished, time.monotonic_ns(), self._runner.state_hash)


def main() -> None:
    run(lambda lifeline: Worker(boot(lifeline), lifeline).run())


if __name__ == "__main__":
    main()
