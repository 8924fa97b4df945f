"""A step of prompt tokens beside decode rows, by default of the 31B on a rank of four: `python -m tests.bench.mixed --help`.

Milliseconds of it and of a step of as many prompt tokens alone, through the runner, two steps out, in turn: a GPU that slows down
does so for both. A step has --budget rows, or with --on-top so many beside its decode rows; its prompts, of --prompt tokens, are
whole but for the last. --shard-of: one GPU computes what a rank of so many does, but for the sums over ranks. --cpu: on a nano
shape, a rehearsal.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.config import engine_config
from engine.geometry import kv_groups, read_geometry
from engine.plan import Admission, StepPlan, encode_plan, single_rows
from engine.protocol import SamplingParams
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from tests.bench.gpu_ranks import run_on_gpus
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import BareRank, pages_held
from tests.bench.profiling.decode_times import lengths_kept
from tests.bench.shard_model import write_shard
from tests.nano.random_models import model_folder
from tests.support.engine.plans import PageAppend, PrefillChunk

CONTEXT, STEPS, SERIES = 1024, 7, 3  # tokens behind a decode row; steps of a series; the first two and the last are not timed


class Steps:
    """Such steps on a rank, over and over: decode rows in the first slots, prompts in those behind them."""

    def __init__(self, rank: BareRank, budget: int, prompt: int, *, on_top: bool) -> None:
        self._rank, self._budget, self._prompt, self._on_top, self._step = rank, budget, prompt, on_top, 0

    def milliseconds(self, decodes: int) -> tuple[float, float]:
        """Of a step with so many decode rows: the mean, and what the host takes to launch one while the device is idle."""
        whole, rest = divmod(self._budget - decodes * (not self._on_top), self._prompt)
        sizes = [self._prompt] * whole + [rest] * bool(rest)
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
        prompt = args.budget - decodes * (not args.on_top)
        print(f"{decodes:4} decode rows, {prompt} prompt tokens: {each} ms, host {host:.2f}; {here - without:+.2f}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mixed", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="another one than the 31B")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--shard-of", type=int, help="ranks, of which one GPU is one")
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
        if args.cpu:
            measure(args, Single(), torch.device("cpu"))
        else:
            run_on_gpus(measure, args)


if __name__ == "__main__":
    main()
