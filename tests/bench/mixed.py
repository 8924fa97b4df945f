"""A step of prompt tokens beside decode rows, by default of the 31B on a rank of four: `python -m tests.bench.mixed --help`.

    (else)      milliseconds of it and of a step of as many prompt tokens alone, through the runner, two steps out, in turn: a GPU
                that slows down does so for both. --cpu: the same on a nano shape, a rehearsal; --shard-of: one GPU computes what a
                rank of so many does, but for the sums over ranks
    --list      the launches of both, and the microseconds that they should take; no GPU
    --protocol  what `tests.bench.engine` should then find for a decode step by the peers' protocol; no GPU

A step has --budget rows, or with --on-top so many beside its decode rows; its prompts, of --prompt tokens, are whole but for the
last. What is expected of a launch is what its like took alone on an H200: products at 700 TFLOP/s in whole tiles, NCCL's sums by
their bytes, attention of decode rows by their number, the rest by the bytes that it moves at 4.26 TB/s.
"""

import argparse
import statistics
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import torch

from engine.config import engine_config
from engine.geometry import kv_groups, read_geometry
from engine.memory import BUCKETS
from engine.plan import Admission, StepPlan, StepResult, encode_plan, single_rows
from engine.protocol import SamplingParams
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from tests.bench.gpu_ranks import run_on_gpus
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import BareRank, pages_held
from tests.bench.profiling.decode_times import lengths_kept
from tests.bench.shard_model import write_shard
from tests.nano.random_models import model_folder
from tests.support.engine.listed_steps import geometry, mixed
from tests.support.engine.paced_steps import GROUPS, ModelledRanks, Pace
from tests.support.engine.plans import PageAppend, PrefillChunk
from tests.support.engine.scheduling import SchedulerConfig, scheduler_of

CONTEXT, STEPS, SERIES = 1024, 7, 3  # tokens behind a decode row; steps of a series; the first two and the last are not timed
TILE, FLOPS, COPY, NCCL_US = 128, 7.0e14, 4.26e12, 123.0  # rows; a second; bytes a second; of 2048 rows of 5376
DECODE_US = {  # attention of so many decode rows behind 1024 tokens, by head dim: tests.bench.attention on an H200
    256: ((0, 0.0), (1, 6.6), (8, 15.6), (16, 24.8), (32, 40.2), (64, 70.5), (100, 113.7)),
    512: ((0, 0.0), (1, 9.7), (8, 17.5), (16, 19.3), (32, 27.0), (64, 42.0), (100, 62.5)),
}
EXTEND_FLOPS = {256: 3.5e14, 512: 2.2e14}
STEP_MS = ((1, 4.79), (8, 5.65), (32, 7.61), (64, 9.87), (100, 12.8))  # of decode rows alone: tests.bench.engine on four H200
KINDS = {  # and the kernel that is all of it
    "sums over ranks": "", "products": "", "attention of chunks": "_extend", "attention of decode rows": "decode_kernel",
    "the rest": "",
}  # fmt: skip


def chunks_of(tokens: int, prompt: int) -> list[tuple[int, int]]:
    """Chunks (start, end) of a step of `tokens` prompt tokens: whole prompts, and a part of the last."""
    whole, rest = divmod(tokens, prompt)
    return [(0, prompt)] * whole + ([(0, rest)] if rest else [])


def expected_us(chunks: list[tuple[int, int]], decodes: int) -> dict[str, float]:
    """Microseconds of all launches of a kind in a step of the 31B at TP=4."""
    shape, tokens = geometry("31b"), sum(end - start for start, end in chunks)
    rows, seen = tokens + decodes, sum((end - start) * (start + end + 1) / 2 for start, end in chunks)
    found = dict.fromkeys(KINDS, 0.0)
    found["sums over ranks"] = (2 * len(shape.layers) + 1) * NCCL_US * rows / 2048
    for layer in shape.layers:
        heads, kv_heads, width = shape.heads // 4, max(1, layer.kv_heads // 4), layer.intermediate // 4
        qkv = (heads + (2 - layer.k_eq_v) * kv_heads) * layer.head_dim
        weights = shape.hidden * (qkv + heads * layer.head_dim + 3 * width)
        found["products"] += 2e6 * weights * -(-rows // TILE) * TILE / FLOPS
        found["attention of chunks"] += 4e6 * seen * heads * layer.head_dim / EXTEND_FLOPS[layer.head_dim]
        found["attention of decode rows"] += _between(DECODE_US[layer.head_dim], decodes)
        found["the rest"] += 2e6 * (rows * (8 * shape.hidden + 3 * width) + 2 * tokens * qkv) / COPY
    return found


def _between(points: tuple[tuple[int, float], ...], at: int) -> float:
    after = min(max(bisect_left([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)


def list_launches(args: argparse.Namespace) -> None:
    """Launches, and microseconds of all of a kind: a step of prompt tokens alone, and beside each number of decode rows."""
    cases, lines = (0, *args.decodes), {kind: [f"| {kind} |"] for kind in (*KINDS, "all")}
    for decodes in cases:
        launches = Counter(node.kernel for node in mixed(args.budget - decodes, decodes, buckets=BUCKETS))
        counts = {kind: launches[kernel] for kind, kernel in KINDS.items() if kernel}
        counts["products"], counts["the rest"] = 4 * launches["_extend"], sum(launches.values()) - sum(counts.values())
        counts["sums over ranks"] = launches["_allreduce_norm"]
        took = expected_us(chunks_of(args.budget - decodes, args.prompt), decodes)
        for kind in KINDS:
            lines[kind].append(f" {counts[kind]}, {took[kind]:.0f} |")
        lines["all"].append(f" {sum(counts.values())}, {sum(took.values()):.0f} |")
    print("| launches, us |", *(f" {decodes} decode rows |" for decodes in cases), sep="")
    print("|---" * (len(cases) + 1) + "|", *("".join(line) for line in lines.values()), sep="\n")


def protocol_ms(batch: int, prompt: int, budget: int) -> float:
    """What `tests.bench.engine` should give for `step`: the real scheduler, in virtual time."""

    def last(tokens: int) -> float:
        ranks = ModelledRanks()

        def execute(plan: StepPlan) -> tuple[StepResult, float]:
            decodes, chunks = len(plan.rows), [(start, end) for _, start, end, *_ in plan.chunks]
            took = 1e-3 * sum(expected_us(chunks, decodes).values()) if chunks else _between(STEP_MS, decodes)
            return ranks.run(plan)[0], took

        world = Pace(scheduler_of(SchedulerConfig(GROUPS, (40 * batch + 400, 80 * batch), batch, 2 * prompt, budget)), execute)
        for _ in range(batch):
            world.arrive(0, prompt, tokens)
        world.run(1e9)
        return world.now

    return (last(129) - last(1)) / 128


class Steps:
    """Such steps on a rank, over and over: decode rows in the first slots, prompts in those behind them."""

    def __init__(self, rank: BareRank, budget: int, prompt: int, *, on_top: bool) -> None:
        self._rank, self._budget, self._prompt, self._on_top, self._step = rank, budget, prompt, on_top, 0

    def milliseconds(self, decodes: int) -> tuple[float, float]:
        """Of a step with so many decode rows: the mean, and what the host takes to launch one while the device is idle."""
        sizes = [end for _, end in chunks_of(self._budget - decodes * (not self._on_top), self._prompt)]
        chunks = [PrefillChunk(slot, 0, size, size - 1) for slot, size in enumerate(sizes, decodes)]
        plans = [encode_plan(self._admitted(decodes, sizes))]
        for _ in range(STEPS):
            self._step += 1
            plans.append(encode_plan(StepPlan(self._step, chunks=chunks, rows=single_rows(range(decodes)))))
        self._rank.run(plans[:3])
        with lengths_kept(self._rank):
            _, seconds = self._rank.run(plans[3:-1])
            began = time.monotonic()
            launched = self._rank.runner.launch(plans[-1])
            host = time.monotonic() - began
            launched.finish()
        return 1e3 * seconds / len(plans[3:-1]), 1e3 * host

    def _admitted(self, decodes: int, sizes: list[int]) -> StepPlan:
        """A plan that admits all, and runs the decode rows once."""
        self._step += 1
        plan = self._rank.admission(decodes, CONTEXT, STEPS, self._step)
        for cache in self._rank.cache:
            group = cache.group
            taken = {page for index, _, _, page in plan.appends if index == group.index}
            free = iter(page for page in range(1, cache.pool.shape[1]) if page not in taken)
            for slot, size in enumerate(sizes, decodes):
                plan.appends.extend(PageAppend(group.index, slot, entry, next(free)) for entry in group.pages_for(0, size))
        for slot, size in enumerate(sizes, decodes):
            tokens, params = [300 + at % 700 for at in range(size)], SamplingParams(max_tokens=1)
            plan.admissions.append(Admission(slot, self._step, tokens, size, params))
        return plan


@torch.inference_mode()
def measure(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
    """Every number of decode rows in turn, on one rank of the group."""
    on_gpu = device.type == "cuda"
    folder = args.folder or model_folder(args.model or ("dummy:31b" if on_gpu else "random:31b"))
    most = max(args.decodes, default=0)
    config = engine_config(
        model=str(folder), tp=parallel.size, device=device.type, dtype="bfloat16" if on_gpu else "float32", load_format="dummy",
        max_seqs=most + args.budget // args.prompt + 1, max_len=2 * max(CONTEXT, args.prompt),
        prefill_budget=args.budget + most * args.on_top, graphs=not args.eager,
    )  # fmt: skip
    held = pages_held(kv_groups(read_geometry(folder), parallel.size, config.page), max(1, most), CONTEXT, STEPS)
    pages = tuple(count + args.budget // config.page + config.max_seqs for count in held)
    loaded, free = load_rank(config, parallel, device, checked=False), torch.cuda.mem_get_info()[0] if on_gpu else 0
    rank = bare_rank.build(loaded, pages, print if parallel.rank == 0 else lambda _: None)
    if on_gpu:
        print(f"pools and graphs take {(free - torch.cuda.mem_get_info()[0]) >> 20} MiB", flush=True)
        rank.runner.warm()
    steps, cases = Steps(rank, args.budget, args.prompt, on_top=args.on_top), (0, *args.decodes)
    seen: dict[int, list[tuple[float, float]]] = {decodes: [] for decodes in cases}
    for _ in range(SERIES):
        for decodes in cases:
            seen[decodes].append(steps.milliseconds(decodes))
    for decodes in cases if parallel.rank == 0 else ():
        each, host = " ".join(f"{ms:.2f}" for ms, _ in seen[decodes]), min(host for _, host in seen[decodes])
        here, without = (statistics.median(ms for ms, _ in seen[count]) for count in (decodes, 0))
        whole, alone = (sum(expected_us(chunks_of(args.budget - count, args.prompt), count).values()) for count in (decodes, 0))
        prompt = args.budget - decodes * (not args.on_top)
        line = f"{decodes:4} decode rows, {prompt} prompt tokens: {each} ms, host {host:.2f}; {here - without:+.2f}"
        expected = on_gpu and not (args.model or args.on_top)
        print(line + (f", {1e-3 * (whole - alone):+.2f} expected" if expected else ""), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mixed", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="another one than the 31B")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--shard-of", type=int, help="ranks, of which one GPU is one")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--protocol", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--budget", type=int, default=2048, help="rows of a step")
    parser.add_argument("--on-top", action="store_true", help="decode rows come on top of the budget")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--decodes", type=int, nargs="*", default=[8, 32, 64, 100], help="decode rows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = None
        if args.shard_of:
            args.tp, args.folder = 1, write_shard(model_folder("dummy:31b"), args.shard_of, Path(folder))
        run(args)


def run(args: argparse.Namespace) -> None:
    """What was asked for."""
    if args.list:
        list_launches(args)
    elif args.protocol:
        for batch in args.decodes:
            print(f"batch {batch:4}: {protocol_ms(batch, args.prompt, args.budget):.2f} ms by the protocol", flush=True)
    elif args.cpu:
        measure(args, Single(), torch.device("cpu"))
    else:
        run_on_gpus(measure, args)


if __name__ == "__main__":
    main()
