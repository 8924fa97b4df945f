"""The decode step of a rank, without core and replica: `python -m tests.bench.step --help`.

Sequences of `--context` tokens are admitted with their pages full of random K and V, and decoded. For each batch it prints
milliseconds a step: `graph`, replays back to back, which is what the device takes; `launch`, plans through the runner, two out at a
time, which is what the host allows; `floor`, its bytes at the best read rate seen on an H200. `tests.bench.tpot` draws them.

    --drafts 5 --accepted 4.42 each step verifies 5 drafts and gives so many tokens in the mean, whatever is drafted: random weights
                               accept nothing. `token`, milliseconds a token, a stream's; `verify` and `draft`, the device's

    --adapters 8 --rank 16     each batch twice: without adapters, and with rows of so many in turn, on the matrices of --targets

    --try down:64,256,6        other tiles of up to 64 rows, as in `tests.bench.layer_products`; the start takes longer

    --tp 4                     four ranks on four GPUs
    --tp 4 --loopback          rank 0 of four on one GPU: its sums and choices go to itself: all but the wires
    --device cpu               everything but graphs, on nano shapes: a rehearsal
"""

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from deploy.models.resolve import resolve
from engine.config import engine_config
from engine.plan import StepPlan, decode_result, encode_plan, single_rows
from engine.rank import compile_ahead
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from engine.rank.stages import draft_stage
from engine.step_shapes import StepSizes
from kernels.precompile import set_cache_keys
from kernels.tiles import MOST_ROWS
from tests.bench.gpu_ranks import run_on_gpus
from tests.bench.layer_products import Tiles, parse, tiles_of
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import BareRank, pages_held
from tests.bench.profiling.decode_times import WARM_STEPS, lengths_kept, replay, replay_ms, time_step
from tests.bench.profiling.loopback import Loopback
from tests.bench.shard_model import write_int4, write_shard
from tests.nano.model_shapes import PUBLIC
from tests.support.engine import drafters
from tests.support.engine.adapters import add_random
from tests.support.engine.draws import draft_chance
from tests.support.engine.products import products


def say(parallel: Parallel, text: str) -> None:
    if parallel.rank == 0:
        print(text, flush=True)


def build(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> BareRank:
    """The rank over pools that hold the largest batch."""
    folder, most = resolve(args.model), max(args.batches)
    with tempfile.TemporaryDirectory() as scratch:
        if args.shard_of > 1:
            folder = write_shard(folder, args.shard_of, Path(scratch) / "target")
        if args.weights == "int4":
            folder = write_int4(folder, Path(scratch) / "int4")
        mtp = {"model": str(drafters.write(folder, Path(scratch) / "drafter")), "drafts": args.drafts} if args.drafts else {}
        config = engine_config(
            model=str(folder), tp=parallel.size, device=device.type, load_format="dummy",
            max_seqs=most, max_len=args.max_len, prefill_budget=args.prefill_budget, page=32, debug_pages=args.debug_pages, mtp=mtp,
            weights=args.weights, head=args.head, kv_dtype=args.kv_dtype,
        )  # fmt: skip
        compilers = compile_ahead.start(config) if device.type == "cuda" and parallel.rank == 0 else []
        draft_stage.accept = drafters.accepting(draft_chance(args.accepted, args.drafts), device)  # type: ignore[assignment]
        pages = pages_held(config.kv_groups, most, args.context, args.steps * config.widest)
        rank = load_rank(config, parallel, device, checked=False)
        if args.adapters:
            add_random(rank.model, args.adapters, args.rank, args.targets)
        bench = bare_rank.build(rank, pages, lambda text: say(parallel, text), args.batches)
    compile_ahead.end(compilers)
    return bench


def measure(bench: BareRank, parallel: Parallel, batch: int, args: argparse.Namespace, step: int) -> int:
    """Prints the figures of one batch; the next step number."""
    times = time_step(bench, batch, args.context, args.steps, step)
    figures = {name: round(value, 4) for name, value in asdict(times).items() if value is not None}
    step += args.steps + 1
    if args.drafts:
        figures |= {name: round(value, 4) for name, value in drafting(bench, batch, args, step).items()}
        step += args.steps + 1
    say(parallel, json.dumps(figures))
    return step


def drafting(bench: BareRank, batch: int, args: argparse.Namespace, step: int) -> dict[str, float]:
    """Steps that verify drafts and draft on: tokens that one gives, milliseconds of a step and of a token through the runner, and
    on the device of the step's two halves."""
    runner, width = bench.runner, 1 + args.drafts
    rows = [(slot, width, 0) for slot in range(batch)]
    first = encode_plan(bench.admission(batch, args.context, args.steps * width, step))
    rest = [encode_plan(StepPlan(step + at, drafts=args.drafts, rows=rows)) for at in range(1, args.steps + 1)]
    bench.run([first, *rest[:WARM_STEPS]])
    with lengths_kept(bench):
        results, seconds = bench.run(rest[WARM_STEPS:])
    given = sum(int(decode_result(result).table[:, 2].sum()) for result in results) / len(results) / batch
    step_ms = 1e3 * seconds / len(results)
    figures = {"tokens": given, "drafts_step_ms": step_ms, "token_ms": step_ms / given}
    if (graphs := runner.graphs) is not None:
        bucket, steps = runner.shapes.sequences_of(batch), args.steps - 2 * WARM_STEPS
        figures["verify_ms"] = replay_ms(bench, partial(replay, graphs, bucket, width), steps)
        figures["draft_ms"] = replay_ms(bench, partial(graphs.replay, "draft", StepSizes.decoding(bucket, width)), steps)
    return figures


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
        report.state_hash = 0
        plans = [encode_plan(bench.admission(rows, args.context, args.steps, 1))]
        plans += [encode_plan(StepPlan(at, rows=single_rows(range(rows)))) for at in range(2, 10)]
        results, _ = bench.run(plans)
        runs.append((results, runner.state_hash))
    runner.graphs, report.debug_hash = graphs, False
    say(parallel, f"graph equals eager, hidden bits included: {runs[0] == runs[1]}")
    assert runs[0] == runs[1], "a captured step differs from the eager one"


def profile(bench: BareRank, parallel: Parallel, batch: int, args: argparse.Namespace) -> None:
    """Kernels of one step by name: calls, total and mean microseconds; the trace in `out`."""
    graphs, rows = bench.runner.graphs, bench.runner.shapes.sequences_of(batch)
    if graphs is None:
        return
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            replay(graphs, rows, 1 + args.drafts, "adapted forward" if bench.adapters else "forward")
            if args.drafts:
                graphs.replay("draft", StepSizes.decoding(rows, 1 + args.drafts))
        torch.cuda.synchronize()
    if parallel.rank == 0:
        rows_of = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)
        for row in rows_of[:24]:
            if row.device_time_total > 0:
                mean, total = row.device_time_total / row.count, row.device_time_total / 3
                print(f"  {row.key[:60]:60} {row.count // 3:5} x {mean:8.2f} us = {total:9.1f}")
        seen.export_chrome_trace(f"{args.out}/trace-b{batch}.json.gz")


def tried(args: argparse.Namespace, parallel: Parallel) -> Tiles:
    """The tiles of --try for the shapes of a public model."""
    if not args.tried:
        return {}
    model = PUBLIC[args.model.removeprefix("dummy:")]
    return parse(args.tried, [(each.name, each.shape) for each in products(model, parallel.size * args.shard_of)], model)


@torch.inference_mode()
def run(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
    """All batches on one rank."""
    with tiles_of(tried(args, parallel), MOST_ROWS):
        set_cache_keys()
        bench = build(args, parallel, device)
        if args.check:
            check_graphs(bench, parallel, args)
        adapted = replace(bench, adapters=args.adapters)
        if args.check and args.adapters:
            check_graphs(adapted, parallel, args)
        step = 1
        for batch in args.batches:
            step = measure(bench, parallel, batch, args, step)
            if args.adapters:
                say(parallel, f"the same with {args.adapters} adapters of rank {args.rank}:")
                step = measure(adapted, parallel, batch, args, step)
            if args.profile and batch in args.profile:
                profile(adapted, parallel, batch, args)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="dummy:31b")
    parser.add_argument("--weights", default="auto", help="plain, fp8 or int4")
    parser.add_argument("--head", default="bf16", help="fp8")
    parser.add_argument("--kv-dtype", default="auto", help="fp8")
    parser.add_argument("--try", dest="tried", default="", metavar="PRODUCT:FORM")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--shard-of", type=int, default=1, metavar="N", help="a rank's shard of N, as a model of its own")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--accepted", type=float, default=1.0, help="tokens of a step with drafts, in the mean")
    parser.add_argument("--adapters", type=int, default=0, help="adapters that rows have in turn, timed after none")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--targets", default=r"_proj\.weight$", help="a regex of the matrices that they change")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 100])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--prefill-budget", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--debug-pages", action="store_true", help="with the check of page tables")
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
