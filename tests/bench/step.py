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
import tempfile
from dataclasses import asdict

import torch

from deploy.models.resolve import resolve
from engine.config import engine_config
from engine.geometry import kv_groups, read_geometry
from engine.plan import StepPlan, encode_plan, single_rows
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from tests.bench.gpu_ranks import run_on_gpus
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import READ_RATE, BareRank, pages_held
from tests.bench.profiling.decode_times import time_step
from tests.bench.profiling.loopback import Loopback


def say(parallel: Parallel, text: str) -> None:
    if parallel.rank == 0:
        print(text, flush=True)


def build(args: argparse.Namespace, parallel: Parallel, device: torch.device, *, graphs: bool) -> BareRank:
    """The rank over pools that hold the largest batch."""
    folder, most = resolve(args.model), max(args.batches)
    config = engine_config(
        model=str(folder), tp=parallel.size, device=device.type, dtype=args.dtype, load_format="dummy",
        max_seqs=most, max_len=args.max_len, prefill_budget=args.prefill_budget, page=32, graphs=graphs,
        debug_pages=args.debug_pages,
    )  # fmt: skip
    pages = pages_held(kv_groups(read_geometry(folder), parallel.size), most, args.context, args.steps)
    return bare_rank.build(load_rank(config, parallel, device, checked=False), pages, lambda text: say(parallel, text))


def measure(bench: BareRank, parallel: Parallel, batch: int, args: argparse.Namespace, step: int) -> int:
    """Prints the figures of one batch; the next step number."""
    found = time_step(bench, batch, args.context, args.steps, step, READ_RATE)
    figures = {name: round(value, 4) for name, value in asdict(found).items() if name.endswith("_ms") and value is not None}
    say(parallel, json.dumps({"batch": batch, **figures}))
    return step + args.steps + 1


def check_graphs(bench: BareRank, parallel: Parallel, args: argparse.Namespace) -> None:
    """A captured step gives the bits of the eager one: the same plans through both, hidden rows included."""
    if bench.runner.graphs is None:
        return
    runner, graphs = bench.runner, bench.runner.graphs
    rows = min(3, bench.config.max_seqs)
    report = runner.report_stage
    report.debug_hash = True
    runs = []
    for runner.graphs in (graphs, None):
        report.state.value = 0
        plans = [encode_plan(bench.admission(rows, args.context, args.steps, 1))]
        plans += [encode_plan(StepPlan(at, rows=single_rows(range(rows)))) for at in range(2, 10)]
        results, _ = bench.run(plans)
        runs.append((results, runner.state_hash))
    runner.graphs, report.debug_hash = graphs, False
    say(parallel, f"graph equals eager, hidden bits included: {runs[0] == runs[1]}")
    assert runs[0] == runs[1], "a captured step differs from the eager one"


def profile(bench: BareRank, parallel: Parallel, batch: int, out: str) -> None:
    """Kernels of one step by name: calls, total and mean microseconds; the trace in `out`."""
    graphs, rows = bench.runner.graphs, bench.runner.bucket(batch)
    if graphs is None:
        return
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            graphs.replay("forward", rows)
            graphs.replay("argmax", rows)
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
        step = measure(bench, parallel, batch, args, step)
        if args.profile and batch in args.profile:
            profile(bench, parallel, batch, args.out)


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
    parser.add_argument("--debug-pages", choices=("off", "sample", "every"), default="off", help="with the check of page tables")
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
        run_on_gpus(run, args)


if __name__ == "__main__":
    main()
