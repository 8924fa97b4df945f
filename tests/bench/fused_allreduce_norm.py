"""Fused all-reduce norms over the inboxes of four GPUs: ranks compare their bits, and a chain is timed.

    python -m tests.bench.fused_allreduce_norm [--check 1000]

    check   rounds of 120 fused norms of changing parts, one captured graph a round, each rank delayed at random between rounds:
            every x must be the bits of the sum that is gathered and normed by the library, and the same on all ranks
    time    microseconds of one fused norm in a graph of 120, by rows
"""

import argparse
import json
import random

import torch
from torch import Tensor

from engine.rank.parallel import Inboxes, Parallel, make_inboxes
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from tests.bench.gpu_ranks import milliseconds, run_on_gpus

CHAIN = 120
EPS = 1e-6


def parts_of(rank: int, rows: int, width: int, device: torch.device) -> list[Tensor]:
    """Five parts of one rank, bf16 [rows, width], some elements -0.0."""
    generator = torch.Generator(device).manual_seed(rank)
    made = [torch.randn(rows, width, generator=generator, device=device).bfloat16() for _ in range(5)]
    for part in made:
        part[:, ::97] = -0.0
    return made


def chain(inboxes: Inboxes, parts: list[Tensor], norms: Norms, scalar: Tensor) -> Tensor:
    """CHAIN fused norms, each on the residual of the last but one fives; x of the last five [5, rows, width]."""
    peers = inboxes.allreduce.begin()
    h = None
    xs: list[Tensor] = []
    for call in range(CHAIN):
        if call % 5 == 0:
            h = torch.zeros_like(parts[0])
        h, x = fused_allreduce_norm(parts[call % 5], h, norms, EPS, scalar, peers=peers)
        assert x is not None
        xs.append(x)
    return torch.stack(xs)


def expected(parallel: Parallel, parts: list[Tensor], norms: Norms, scalar: Tensor) -> Tensor:
    """x of five fused norms, [5, rows, width], of sums made from gathered parts."""
    h, xs = torch.zeros_like(parts[0]), []
    for part in parts:
        gathered = parallel.all_gather(part).unflatten(-1, (parallel.size, -1)).float()
        total = gathered[:, 0]
        for rank in range(1, parallel.size):
            total = total + gathered[:, rank]
        h, x = fused_allreduce_norm(total.bfloat16(), h, norms, EPS, scalar)
        assert x is not None
        xs.append(x)
    return torch.stack(xs)


@torch.inference_mode()
def run(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
    """One rank."""
    rank = parallel.rank
    inboxes = make_inboxes(parallel, max(args.rows), args.width, torch.bfloat16)
    assert inboxes is not None
    rng = random.Random(rank)
    generator = torch.Generator(device).manual_seed(99)
    weights = torch.rand(2, args.width, generator=generator, device=device).bfloat16() + 0.5
    norms, scalar = Norms(weights[0], weights[1]), torch.full((1,), 0.75, device=device, dtype=torch.bfloat16)
    for rows in args.rows:
        parts = parts_of(rank, rows, args.width, device)
        want = expected(parallel, parts, norms, scalar).repeat(CHAIN // 5, 1, 1)
        chain(inboxes, parts, norms, scalar)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            xs = chain(inboxes, parts, norms, scalar)
        wrong = torch.zeros(1, dtype=torch.int64, device=device)
        for _ in range(args.check):
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.randrange(1, 400_000))
            graph.replay()
            wrong += (xs != want).sum()
        torch.cuda.synchronize()
        assert not inboxes.allreduce.failed, "a part did not come"
        total = parallel.all_gather(wrong.float())
        best = milliseconds(parallel, lambda: [graph.replay() for _ in range(10)]) * 100 / CHAIN  # noqa: B023 (run at once)
        if rank == 0:
            kind = "sharded" if rows >= inboxes.allreduce.sharded_rows else "one-shot"
            row = {"rows": rows, "kind": kind, "us": round(best, 2), "calls": args.check * CHAIN, "wrong": total.tolist()}
            print(json.dumps(row), flush=True)
        assert not total.any(), f"rank {rank}: {total.tolist()} wrong values"


def main() -> None:
    """The command line."""
    description = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fused_allreduce_norm", description=description)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 31, 32, 64, 100])
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument("--check", type=int, default=200, help="rounds of 120 fused norms")
    run_on_gpus(run, parser.parse_args())


if __name__ == "__main__":
    main()
