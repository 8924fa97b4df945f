"""The decode step of a rank, without core and replica: `python -m tests.bench.step --help`.

Sequences of `--context` tokens are admitted with their pages full of random K and V, and decoded. For each batch it prints
milliseconds a step: `graph`, replays back to back, which is what the device takes; `launch`, plans through the runner, two out at a
time, which is what the host allows. The bytes of a step at the best read rate seen on an H200 stand beside it.

    --tp 4                     four ranks on four GPUs
    --tp 4 --loopback          rank 0 of four on one GPU: its sums and choices go to itself: all but the wires
    --device cpu               everything but graphs, on nano shapes: a rehearsal
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from deploy.models.resolve import resolve
from engine.config import EngineConfig, engine_config
from engine.geometry import Geometry, KVGroup, kv_groups, read_geometry
from engine.plan import Admission, PageAppend, StepPlan, encode_plan
from engine.protocol import SamplingParams
from engine.rank import weights
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import Inboxes, Parallel, Single, connect
from engine.rank.runner import Runner
from engine.rank.step import buckets
from kernels import launch
from kernels.choose import Ballot
from kernels.joint import Peers

READ_RATE = 4.56e12  # bytes a second, the best seen on an H200


class Loopback(Single):
    """Rank 0 of `size`, alone: a sum over ranks is `size` times its own part, a gather `size` copies."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._device = size, device

    def all_reduce(self, x: Tensor) -> Tensor:
        """size * x."""
        return x * self.size

    def all_gather(self, x: Tensor) -> Tensor:
        """x, size times along its last axis."""
        return torch.cat([x] * self.size, dim=-1)

    def exchange_rows(self, x: Tensor) -> Tensor:
        """This rank's rows, size times."""
        return x[:: self.size].expand(self.size, -1, -1).contiguous()

    def inboxes(self, rows: int, width: int, dtype: torch.dtype) -> Inboxes | None:
        """What goes to peer q arrives in this rank's own inbox, as q's. Joints are never sharded: their owner would wait."""
        if self._device.type == "cpu":
            return None
        sizes = [Peers.bytes(self.size, rows, width, dtype), Ballot.bytes(self.size, rows)]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        peers = torch.arange(self.size, dtype=torch.int64, device=self._device)
        joints = Peers(
            memory[: sizes[0]], memory.data_ptr() + peers * rows * width * dtype.itemsize, 0, rows, width, dtype, sharded=1 << 30
        )
        choices = Ballot(
            memory[sizes[0] :], memory.data_ptr() + sizes[0] + peers * rows * 16, 0, rows, joints.errors
        )
        return Inboxes(joints, choices)


@dataclass(frozen=True)
class Bench:
    """A rank and its settings."""

    config: EngineConfig
    geometry: Geometry
    runner: Runner
    model: Gemma4
    groups: tuple[KVGroup, ...]
    caches: tuple[GroupCache, ...]
    steps: int


def build(args: argparse.Namespace, parallel: Parallel, device: torch.device, graphs: bool) -> Bench:
    """The runner over pools that hold the largest batch, filled with random values."""
    began = time.monotonic()
    folder, most = resolve(args.model), max(args.batches)
    config = engine_config(
        model=str(folder), tp=parallel.size, device=device.type, dtype=args.dtype, load_format="dummy",
        max_seqs=most, max_len=args.max_len, prefill_budget=args.prefill_budget, page=32, graphs=graphs,
    )  # fmt: skip
    geometry = read_geometry(folder)
    dtype = getattr(torch, args.dtype)
    model = Gemma4(geometry, parallel, dtype, device)
    weights.dummy(model, geometry)
    say(parallel, f"weights in {time.monotonic() - began:.1f} s")
    width = geometry.hidden * (2 if geometry.moe else 1)
    inboxes = parallel.inboxes(buckets(most)[-1], width, dtype)
    groups = kv_groups(geometry, parallel.size)
    caches = tuple(
        GroupCache(group, most * len(held(group, args.context, args.steps)) + 1, most + 1, args.max_len, dtype, device)
        for group in groups
    )
    for cache in caches:
        for layer in cache.pool:
            layer[1:].normal_()
    runner = Runner(model, KVCache(caches), config, geometry, inboxes)
    if runner.capturable:
        began = time.monotonic()
        runner.capture()
        say(parallel, f"{launch.compilations()} kernels, graphs captured in {time.monotonic() - began:.1f} s")
    return Bench(config, geometry, runner, model, groups, caches, args.steps)


def held(group: KVGroup, context: int, steps: int) -> range:
    """Table entries that a sequence needs while `steps` tokens are decoded behind `context`."""
    return range(group.pages_for(context - 1, context).start, group.pages_for(0, context + steps + 8).stop)


def say(parallel: Parallel, text: str) -> None:
    if parallel.rank == 0:
        print(text, flush=True)


def admission(bench: Bench, batch: int, context: int, step: int) -> StepPlan:
    """`batch` sequences of `context` tokens whose K and V are there; each decodes its last one."""
    rng = random.Random(batch)
    plan = StepPlan(step, decodes=list(range(batch)))
    for group in bench.groups:
        pages = bench.caches[group.index].pool.shape[1]
        free = iter(rng.sample(range(1, pages), pages - 1))
        for slot in range(batch):
            plan.appends.extend(PageAppend(group.index, slot, entry, next(free)) for entry in held(group, context, bench.steps))
    params = SamplingParams(max_tokens=1)
    for slot in range(batch):
        tokens = [rng.randrange(300, bench.geometry.vocab - 10) for _ in range(context)]
        plan.admissions.append(Admission(slot, step, tokens, context, params, cached=context - 1))
    return plan


def through_runner(bench: Bench, plans: list[bytes]) -> tuple[list[bytes], float]:
    """Every plan, two out at a time: results, and seconds."""
    launched: deque = deque()
    results = []
    began = time.monotonic()
    for data in plans:
        launched.append(bench.runner.launch(data))
        if len(launched) == 2:
            results.append(finish(launched.popleft()))
    results += [finish(step) for step in launched]
    return results, time.monotonic() - began


def finish(step) -> bytes:  # noqa: ANN001
    result: bytes = step.result()
    step.fold()
    return result


def step_bytes(bench: Bench, batch: int, context: int) -> int:
    """Weights that a decode step reads once, and the K and V that `batch` rows see."""
    table = bench.model.embedding.tokens.weight
    dense = sum(p.nbytes for name, p in bench.model.named_parameters() if "ple_tokens" not in name and "experts" not in name)
    assert table.nbytes < dense
    seen = sum(
        2 * len(group.layers) * group.kv_heads * group.head_dim * min(context, group.window or context) for group in bench.groups
    )
    return dense + batch * seen * bench.caches[0].pool.element_size()


def measure(bench: Bench, parallel: Parallel, batch: int, args: argparse.Namespace, step: int) -> tuple[int, dict[str, float]]:
    """The figures of one batch; the next step number."""
    first = encode_plan(admission(bench, batch, args.context, step))
    rest = [encode_plan(StepPlan(step + at, decodes=list(range(batch)))) for at in range(1, args.steps + 1)]
    through_runner(bench, [first, *rest[:8]])
    _, seconds = through_runner(bench, rest[8:])
    figures = {"launch_ms": 1e3 * seconds / len(rest[8:])}
    graphs = bench.runner.graphs
    if graphs is not None:
        rows = bench.runner.bucket(batch)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(3):
            start.record()
            for _ in range(args.steps):
                graphs.forward(rows)
                graphs.sample(rows)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / args.steps)
        figures["graph_ms"] = min(times)
    figures["floor_ms"] = 1e3 * step_bytes(bench, batch, args.context) / READ_RATE
    say(parallel, json.dumps({"batch": batch, **{name: round(value, 4) for name, value in figures.items()}}))
    return step + args.steps + 1, figures


def check_graphs(bench: Bench, parallel: Parallel, args: argparse.Namespace) -> None:
    """A captured step gives the bits of the eager one: the same plans through both, hidden rows included."""
    if bench.runner.graphs is None:
        return
    runner, graphs = bench.runner, bench.runner.graphs
    runner.debug_hash = True
    runs = []
    for runner.graphs in (graphs, None):
        runner.state_hash = 0
        plans = [encode_plan(admission(bench, 3, args.context, 1))]
        plans += [encode_plan(StepPlan(at, decodes=[0, 1, 2])) for at in range(2, 10)]
        results, _ = through_runner(bench, plans)
        runs.append((results, runner.state_hash))
    runner.graphs, runner.debug_hash = graphs, False
    say(parallel, f"graph equals eager, hidden bits included: {runs[0] == runs[1]}")
    assert runs[0] == runs[1], "a captured step differs from the eager one"


def profile(bench: Bench, parallel: Parallel, batch: int, out: str) -> None:
    """Kernels of one step by name: calls, total and mean microseconds; the trace in `out`."""
    graphs, rows = bench.runner.graphs, bench.runner.bucket(batch)
    if graphs is None:
        return
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            graphs.forward(rows)
            graphs.sample(rows)
        torch.cuda.synchronize()
    if parallel.rank == 0:
        rows_of = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)
        for row in rows_of[:24]:
            if row.device_time_total > 0:
                mean, total = row.device_time_total / row.count, row.device_time_total / 3
                print(f"  {row.key[:60]:60} {row.count // 3:5} x {mean:8.2f} us = {total:9.1f}")
        seen.export_chrome_trace(f"{out}/trace-b{batch}.json.gz")


@torch.inference_mode()
def run(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
    """All batches on one rank."""
    bench = build(args, parallel, device, graphs=not args.eager)
    if args.check:
        check_graphs(bench, parallel, args)
    step = 1
    for batch in args.batches:
        step, _ = measure(bench, parallel, batch, args, step)
        if args.profile and batch in args.profile:
            profile(bench, parallel, batch, args.out)


def rank(index: int, args: argparse.Namespace, store: str) -> None:
    """One of `--tp` ranks."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    run(args, connect(index, args.tp, device, -1, store, 120.0), device)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="dummy:31b")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 100])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--prefill-budget", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--check", action="store_true", help="graph against eager, bit for bit, first")
    parser.add_argument("--profile", type=int, nargs="*", help="batches whose kernels are listed")
    parser.add_argument("--out", default=tempfile.gettempdir(), help="where traces go")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.tp == 1:
        run(args, Single(), device)
    elif args.loopback:
        run(args, Loopback(args.tp, device), device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank, (args, str(Path(folder) / "store")), args.tp)


if __name__ == "__main__":
    main()
