"""MLPs of many rows over several GPUs: sums by all-reduces against norms of own rows and copies beside products.

    python -m tests.bench.sequence_parallel --tp 2 --rows 2048 8192

In rounds that delay ranks at random both give final rows as close as their roundings are, and norms of own rows the same ones on
all ranks, as graphs and launched kernel by kernel, at random. Milliseconds are of one forward, of as many layers as --layers says,
as a graph; `launched`: kernel by kernel; `products`: of the products alone, likewise.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.rank.parallel import Parallel, make_inboxes
from engine.rank.products import Rows, exchange_over
from engine.rank.weight import Weight
from engine.weight_formats import PLAIN
from kernels.fused_allreduce_norm import Norms
from kernels.linear import GEGLU
from kernels.norm import rms_norm
from kernels.sequence_parallel import SequenceParallel
from tests.bench.gpu_ranks import milliseconds, run_on_gpus

EPS = 1e-6


class InFp32:
    """All-reduces in fp32, rounded once, as norms of own rows add; NCCL rounds the sum of any two."""

    def __init__(self, parallel: Parallel) -> None:
        self.size, self._parallel = parallel.size, parallel

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(x.float()).to(x.dtype)


class Mlps:
    """Layers of a rank, weights and input random. intermediate: of the whole model."""

    def __init__(
        self, parallel: Parallel, layers: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.parallel, self.hidden, self.dtype, self.device = parallel, hidden, dtype, device
        share = intermediate // parallel.size
        self.generator = torch.Generator(device).manual_seed(7)
        self.norms = 0.5 + torch.rand((layers, 2, hidden), generator=self.generator, device=device).to(dtype)
        self.scalar = torch.full((1,), 0.9, device=device, dtype=dtype)
        own = torch.Generator(device).manual_seed(parallel.rank)
        self.weights = [
            (self._weight((2 * share, hidden), own), self._weight((hidden, share), own)) for _ in range(layers)
        ]

    def _weight(self, shape: tuple[int, int], generator: torch.Generator) -> Weight:
        weight = Weight(shape, self.dtype, self.device).stored_as(PLAIN)
        weight.weight.copy_(torch.randn(shape, generator=generator, device=self.device) / shape[1] ** 0.5)
        return weight

    def input(self, rows: int) -> Tensor:
        """The residual [rows, hidden], the same on every rank."""
        generator = self.generator.manual_seed(8)
        return torch.randn((rows, self.hidden), generator=generator, device=self.device).to(self.dtype)

    def forward(self, h: Tensor, peers: SequenceParallel | None) -> Tensor:
        """Final rows [rows, hidden]."""
        exchange = exchange_over(peers, self.parallel, EPS)
        x: Rows = rms_norm(h, self.norms[0, 1], EPS)
        for (gate_up, down), (post, next_norm) in zip(self.weights, self.norms, strict=True):
            part = exchange.row_parallel(down, exchange.gated(gate_up, x, down))
            h, x = exchange.sum_norm(part, h, Norms(post, next_norm), self.scalar)
        return exchange.all_rows(x)

    def forward_by_rows(self, h: Tensor, sequence: SequenceParallel) -> Tensor:
        """Final rows, of which each rank norms its own."""
        return self.forward(h, sequence.begin(len(h)))

    def products(self, h: Tensor) -> Tensor:
        """The products alone."""
        for gate_up, down in self.weights:
            h = down.product(gate_up.product(h, GEGLU))
        return h


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A graph of it, warmed up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@torch.inference_mode()
def run(args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
    """One rank."""
    rank = parallel.rank
    inboxes = make_inboxes(parallel, 8, args.hidden, torch.bfloat16, range(max(args.rows) + 1))
    assert inboxes is not None
    sequence = inboxes.sequence
    assert sequence is not None
    layers = Mlps(parallel, args.layers, args.hidden, args.intermediate, torch.bfloat16, device)
    rng = random.Random(rank)
    for rows in args.rows:
        h = layers.input(rows)
        layers.parallel = InFp32(parallel)
        expected = layers.forward(h, None).float()
        layers.parallel = parallel
        worst, equal = 0.0, True
        eager, all_reduces = partial(layers.forward_by_rows, h, sequence), partial(layers.forward, h, None)
        replay, replay_all_reduces = captured(eager), captured(all_reduces)
        for _ in range(args.check):
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.randrange(1, 4_000_000))
            x = rng.choice((eager, replay))().clone()
            every = parallel.all_gather(x).unflatten(-1, (parallel.size, -1))
            equal = equal and bool((every == x[:, None]).all())
            worst = max(worst, float((x.float() - expected).norm() / expected.norm()))
        assert not inboxes.allreduce.failed, "a copy did not come"
        times = {
            "all_reduce": milliseconds(parallel, replay_all_reduces),
            "sequence": milliseconds(parallel, replay),
            "launched": milliseconds(parallel, eager),
            "products": milliseconds(parallel, partial(layers.products, h)),
        }
        if rank == 0:
            print(json.dumps({"rows": rows, "relative": worst, "equal": equal, **times}), flush=True)
        assert equal, f"rank {rank}: ranks have different rows"
        assert worst < args.tolerance, f"rank {rank}: {worst}"


def main() -> None:
    """The command line."""
    description = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sequence_parallel", description=description)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=5376)
    parser.add_argument("--intermediate", type=int, default=21504)
    parser.add_argument("--check", type=int, default=30, help="rounds")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of final rows, relative, to those of all-reduces")
    run_on_gpus(run, parser.parse_args())


if __name__ == "__main__":
    main()
