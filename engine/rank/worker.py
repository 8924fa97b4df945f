"""A rank's process: plans in, results out. `python -m engine.rank.worker '<BootArgs>'`.

    boot   Configure -> geometry, group, model, weights -> Loaded -> Allocate -> KV cache, self-check -> Ready
    loop   a step that is done is published; a plan that is there is launched; with two launched, or no plan there, the oldest
           is waited for

Rank 0 writes the results to its ring. A stop plan ends the process, as does the end of the lifeline; any exception ends it too, and
by that the group: the replica is told why.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.config import EngineConfig
from engine.geometry import Geometry, kv_groups, read_geometry
from engine.lifeline import BootArgs, Lifeline, Loaded, Ready, run
from engine.memory import cpu_budget, gpu_budget
from engine.plan import DEPTH, Phase, StepResult, decode_plan, encode_result
from engine.rank import weights
from engine.rank.attention import attention_backend
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import Parallel, connect, self_check
from engine.rank.runner import Launched, Runner
from kernels.allreduce import MappedCollectives

IDLE_S = 200e-6


@dataclass(frozen=True)
class Rank:
    """A rank that has loaded its weights."""

    config: EngineConfig
    geometry: Geometry
    device: torch.device
    parallel: Parallel
    model: Gemma4

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config)


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """The activations' and the cache's dtype."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load(config: EngineConfig, args: BootArgs) -> Rank:
    """Join the group and fill this rank's shard."""
    geometry = read_geometry(Path(config.model))
    device = torch.device("cuda", args.index) if config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores; results must not depend on how many there are
    parallel = connect(args.index, args.tp, device, args.reduce, args.store, config.boot_timeout_s)
    model = Gemma4(geometry, parallel, torch_dtype(config), device)
    if config.load_format == "dummy":
        weights.dummy(model, geometry)
    else:
        weights.load(model, Path(config.model), geometry, args.index, args.tp, progress=args.index == 0)
    return Rank(config, geometry, device, parallel, model)


def build(rank: Rank, pages: tuple[int, ...]) -> Runner:
    """The runner of a loaded rank, with a KV cache of `pages` pages a group."""
    config = rank.config
    caches = [
        GroupCache(group, count, config.max_seqs, config.max_len, rank.dtype, rank.device)
        for group, count in zip(kv_groups(rank.geometry, config.tp, config.page), pages, strict=True)
    ]
    attention = attention_backend(config.attention or "reference")
    return Runner(rank.model, KVCache(caches), rank.parallel, attention, config, rank.geometry)


def kv_bytes(rank: Rank) -> int:
    """Bytes that this rank may spend on KV pages."""
    if rank.device.type == "cpu":
        return cpu_budget(rank.config.tp)
    free, total = torch.cuda.mem_get_info(rank.device)
    return gpu_budget(total, total - free, rank.config.memory_fraction)


def boot(lifeline: Lifeline) -> Runner:
    """The handshake, up to Ready."""
    started = time.monotonic()
    config = lifeline.configure()
    lifeline.phase(Phase.loading)
    rank = load(config, lifeline.args)
    weight_bytes = sum(parameter.nbytes for parameter in rank.model.parameters())
    with torch.inference_mode():
        rms = weights.residual_rms(rank.model)
    seconds = time.monotonic() - started
    lifeline.send(Loaded(kv_bytes=kv_bytes(rank), weight_bytes=weight_bytes, residual_rms=rms, seconds=seconds))
    runner = build(rank, lifeline.allocate())
    self_check(rank.parallel, rank.device, rank.dtype)
    if isinstance(rank.parallel, MappedCollectives):
        rank.parallel.timeout_s = config.step_timeout_s  # from here on everybody is up
    lifeline.phase(Phase.ready, weight_bytes)
    lifeline.send(Ready(note=f"{weight_bytes / 1e9:.2f} GB of weights, residual rms {rms:.2f}, {seconds:.1f} s"))
    return runner


class Worker:
    """The loop around the runner."""

    def __init__(self, runner: Runner, lifeline: Lifeline) -> None:
        args = lifeline.args
        self._runner = runner
        self._lifeline = lifeline
        self._plans = RingReader(map_shared(args.plan), args.tp, args.index)
        self._results = RingWriter(map_shared(args.result), 1) if args.index == 0 else None
        self._waiter = Waiter(args.spin, idle_s=IDLE_S)
        self._launched: deque[tuple[Launched, int]] = deque()
        self._last = 0
        self._step_us = 0

    def run(self) -> None:
        """Until a stop plan comes; the steps before it are finished."""
        running = True
        while running:
            while self._launched and self._launched[0][0].done:
                self._finish()
            record = self._plans.poll() if len(self._launched) < DEPTH else None
            if record is not None:
                self._waiter.reset()
                running = self._launch(*record)
            elif self._launched:
                self._finish()
            else:
                self._waiter.wait()
        while self._launched:
            self._finish()

    def _launch(self, step: int, data: bytes) -> bool:
        """Start a step; False for a stop plan."""
        plan = decode_plan(data)
        assert plan.step == step, f"record {step} holds plan {plan.step}"
        if plan.stop:
            return False
        started = time.monotonic_ns()
        self._last = step
        self._progress(step - 1 - len(self._launched))  # before: on the CPU the launch is the step, and a hang shows as no progress
        self._launched.append((self._runner.launch(plan, data), started))
        return True

    def _finish(self) -> None:
        launched, started = self._launched.popleft()
        result = launched.finish()
        self._publish(result)
        self._step_us = (time.monotonic_ns() - started) // 1000
        self._progress(result.step)

    def _publish(self, result: StepResult) -> None:
        if self._results is not None:
            self._results.write(result.step, encode_result(result))

    def _progress(self, finished: int) -> None:
        args, now = self._lifeline.args, time.monotonic_ns()
        self._lifeline.status.progress(args.index, self._last, finished, now, self._runner.state_hash, self._step_us)


def main() -> None:
    """Entry point of the process."""
    run(lambda lifeline: Worker(boot(lifeline), lifeline).run())


if __name__ == "__main__":
    main()
