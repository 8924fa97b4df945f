"""Attention kernels timed on one GPU: `python -m tests.bench.attention --out FILE`, every figure a JSON line of FILE.

Decode attention of one layer at a rank's real shapes. Launches follow one another in a CUDA graph under programmatic dependent
launch, each over a pool of its own, together far larger than the L2 cache. Every cut of the work is compared with the fp32
reference first. Variants are compiled beforehand by as many processes as there are cores.

--dry runs the same steps on the CPU, small and without figures.
"""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from kernels.decode import DecodeScratch, DecodeTile, decode_attention, decode_splits, decode_tile
from kernels.launch import plain_torch
from kernels.tiles import LARGE_SHARED
from tests.bench.timing import FAILURES, READ_RATE, launch_us, precompile_all
from tests.support.attention import Shape, decode_node
from tests.support.launches import variants

PAGE = 32
HOPPER, PROCESSORS = (9, 0), 132  # what variants are compiled for
EPS = 1e-6
CANDIDATES = 24
IN_TURN = 256 << 20  # bytes of pools that launches read in turn: several times the L2 cache
BATCHES = (1, 4, 8, 16, 32, 100)
LONG = (1, 8, 32, 100)  # batches of the longer contexts
TOLERANCE = 1e-2  # relative error of bf16 attention against fp32: 2e-3 is usual


@dataclass(frozen=True)
class Layer:
    """One rank's share of a layer."""

    name: str
    heads: int
    kv_heads: int
    d: int
    pairs: int
    kv_projections: int
    window: int | None
    contexts: tuple[int, ...] = (1024,)
    candidates: int = 5

    @property
    def shape(self) -> Shape:
        return Shape(self.heads, self.kv_heads, self.d, self.pairs, self.kv_projections, self.window, PAGE)


LAYERS = (
    Layer("31b-tp4-sliding", 8, 4, 256, 128, 2, 1024, candidates=CANDIDATES),
    Layer("31b-tp4-full", 8, 1, 512, 64, 1, None, (1024, 8192), CANDIDATES),
    Layer("26b-tp4-sliding", 4, 2, 256, 128, 2, 1024),
    Layer("26b-tp4-full", 4, 1, 512, 64, 1, None, (1024, 8192)),
    Layer("26b-tp1-sliding", 16, 8, 256, 128, 2, 1024),
    Layer("26b-tp1-full", 16, 2, 512, 64, 1, None, (1024, 8192)),
    Layer("e2b-tp1-sliding", 8, 1, 256, 128, 2, 512),
)
Cut = tuple[int, DecodeTile]


@dataclass(frozen=True)
class Problem:
    """A layer at a batch and a context; rows' lengths differ by less than two pages."""

    layer: Layer
    rows: int
    context: int

    @property
    def positions(self) -> list[int]:
        return [self.context + 17 + 13 * row % 48 for row in range(self.rows)]

    def first(self, position: int) -> int:
        """The first page that a row reads."""
        return 0 if self.layer.window is None else max(0, position - self.layer.window + 1) // PAGE

    @property
    def pages(self) -> int:
        """Pages of the longest row."""
        return max(position // PAGE - self.first(position) + 1 for position in self.positions)

    @property
    def bytes(self) -> int:
        """K and V that a launch must read."""
        window = self.layer.window or 1 << 30
        return sum(min(position + 1, window) for position in self.positions) * 4 * self.layer.kv_heads * self.layer.d


def candidates(problem: Problem, processors: int) -> list[Cut]:
    """Cuts worth trying, the default first, the likeliest next: splits that leave no CTA a page more than needed."""
    layer, rows, pages = problem.layer, problem.rows, problem.pages
    splits = decode_splits(rows, layer.kv_heads, layer.d, pages, processors)
    default = (splits, decode_tile(layer.d, PAGE, rows * layer.kv_heads * splits, -(-pages // splits), 2, LARGE_SHARED))
    few = (1, 2, 3, 4, 5, 6, 8, 11, 17, 24, 33, 48, 64)
    even = {-(-pages // -(-pages // n)) for n in few if n <= pages}
    near = sorted(even, key=lambda n: abs(math.log(n / splits)))
    found = {default: None}
    for n, tile in itertools.product(near[:5], _tiles(layer.d)):
        early = 2 * n >= pages and tile.keys == PAGE
        ctas = rows * layer.kv_heads * n * tile.values
        if tile.values == 1 or ctas <= 2 * processors:
            found[n, replace(tile, early=early)] = None
    return list(found)[: layer.candidates]


def _tiles(d: int) -> list[DecodeTile]:
    if d <= 256:
        shapes = [(PAGE, 1, 4, 3), (16, 1, 4, 3), (PAGE, 1, 4, 2), (2 * PAGE, 1, 4, 2), (PAGE, 2, 4, 2)]
    else:
        shapes = [(PAGE, 1, 4, 3), (PAGE, 2, 4, 2), (PAGE, 1, 4, 2), (PAGE, 4, 4, 2), (16, 1, 4, 3), (PAGE, 4, 8, 3)]
    return [DecodeTile(*shape, early=False) for shape in shapes]


class Inputs:
    """Random inputs of a problem, for `copies` launches over pools of their own."""

    def __init__(self, problem: Problem, copies: int, device: torch.device, memory: Tensor | None = None) -> None:
        layer, rows = problem.layer, problem.rows
        self.problem = problem
        self.width = -(-problem.pages // 16) * 16
        shape = (copies, rows * problem.pages + 1, 2, layer.kv_heads, PAGE, layer.d)
        size = math.prod(shape)
        if memory is None:
            memory = torch.randn(size, device=device).to(torch.bfloat16) * layer.d**-0.25
        self.pools = memory[:size].view(shape)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(torch.bfloat16)

        self.qkv = draw(rows, (layer.heads + layer.kv_projections * layer.kv_heads) * layer.d)
        self.norms = [(1 + 0.1 * draw(layer.d)) * layer.d**-0.25 for _ in "qk"]
        angles = torch.rand(rows, layer.pairs, device=device) * 6.28
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.positions = torch.tensor(problem.positions, dtype=torch.int32, device=device)
        self.page_ids = torch.full((rows, self.width), 2**31 - 7, dtype=torch.int32, device=device)
        order = torch.randperm(rows * problem.pages, device=device).to(torch.int32).view(rows, -1) + 1
        self.page_ids[:, : problem.pages] = order
        self.out = torch.empty(rows, layer.heads * layer.d, dtype=torch.bfloat16, device=device)

    def run(self, copy: int, cut: Cut, scratch: DecodeScratch) -> None:
        """One launch."""
        given = (self.qkv, self.pools[copy], self.page_ids, self.positions, self.cos_sin, *self.norms, EPS)
        decode_attention(*given, self.problem.layer.window, scratch, self.out, *cut)

    def reference(self, scratch: DecodeScratch) -> Tensor:
        """What a launch over the first pool must give."""
        out = torch.empty_like(self.out)
        given = (self.qkv, self.pools[0], self.page_ids, self.positions, self.cos_sin, *self.norms, EPS)
        with plain_torch():
            decode_attention(*given, self.problem.layer.window, scratch, out, 1)
        return out


def error(out: Tensor, want: Tensor) -> float:
    """Relative, over the whole output; NaN counts as infinite."""
    value = float((out.float() - want.float()).norm() / want.float().norm())
    return math.inf if math.isnan(value) else value


# -- the run


@dataclass
class Bench:
    """Where figures go, and what they are held to."""

    device: torch.device
    out: TextIO
    deadline: float
    skipped: int = 0

    def problem(self, problem: Problem, cuts: Sequence[Cut], memory: Tensor | None) -> Iterator[dict[str, Any]]:
        """A row for each cut, once the default has been compared with the reference; after the deadline the default alone."""
        copies = max(1, min(96, -(-IN_TURN // problem.bytes))) if self.device.type == "cuda" else 2
        inputs = Inputs(problem, copies, self.device, memory)
        layer = problem.layer
        parts = problem.rows * max(splits for splits, _ in cuts)
        scratch = DecodeScratch(problem.rows, layer.heads, layer.kv_heads, layer.d, parts, self.device)
        want = inputs.reference(scratch)
        for place, cut in enumerate(cuts):
            if place and time.perf_counter() > self.deadline:
                self.skipped += len(cuts) - place
                return
            try:
                yield self.row(inputs, cut, scratch, want, copies)
            except FAILURES as failure:  # a cut that does not fit ends no sweep; a wrong result does
                yield {**_named(problem, cut), "failed": str(failure)[:200]}

    def row(self, inputs: Inputs, cut: Cut, scratch: DecodeScratch, want: Tensor, copies: int) -> dict[str, Any]:
        """One cut, right or refused, timed."""
        problem = inputs.problem
        known = len(variants())
        inputs.out.fill_(math.nan)
        inputs.run(0, cut, scratch)
        off = error(inputs.out, want)
        assert off < TOLERANCE, f"{problem} {cut}: relative error {off}"
        launches = [lambda copy=i % copies: inputs.run(copy, cut, scratch) for i in range(max(copies, 16))]
        us = launch_us(launches if self.device.type == "cuda" else launches[:2], self.device)
        compiled = variants()[-1] if len(variants()) > known else None
        floor = 1e6 * problem.bytes / READ_RATE
        return {
            **_named(problem, cut),
            "us": round(us, 2),
            "bytes": problem.bytes,
            "tb_s": round(problem.bytes / us / 1e6, 3),
            "floor_us": round(floor, 2),
            "predicted_us": round(4.5 + floor / 0.9, 2),
            "registers": compiled.n_regs if compiled else None,
            "error": round(off, 5),
        }


def _named(problem: Problem, cut: Cut) -> dict[str, Any]:
    splits, tile = cut
    named = {"kernel": "decode_attention", "shape": problem.layer.name, "rows": problem.rows, "context": problem.context}
    return {**named, "splits": splits, "tile": asdict(tile)}


def best_line(rows: Sequence[dict[str, Any]]) -> str:
    """The best cut of a problem beside the default, for people."""
    if failed := [row for row in rows if "failed" in row]:
        print(f"{len(failed)} cuts failed, the first: {failed[0]}", flush=True)
    best, default = min((row for row in rows if "us" in row), key=lambda row: row["us"]), rows[0]
    tile = " ".join(f"{name} {value}" for name, value in best["tile"].items())
    head = f"{best['shape']:16} rows {best['rows']:3} ctx {best['context']:5}"
    usual = default.get("us", math.nan)
    figures = f"{best['us']:8.2f} us {best['tb_s']:6.3f} TB/s (default {usual:8.2f}, floor {best['floor_us']:7.2f})"
    return f"{head} {figures}  splits {best['splits']} {tile}"


def problems(names: Sequence[str], batches: Sequence[int]) -> list[Problem]:
    """What is measured."""
    layers = [layer for layer in LAYERS if not names or layer.name in names]
    cases = [(layer, context) for layer in layers for context in layer.contexts]
    return [Problem(layer, rows, context) for layer, context in cases for rows in batches if context == 1024 or rows in LONG]


def compiled_ahead(args: argparse.Namespace) -> dict[Problem, list[Cut]]:
    """The problems and their cuts, every variant compiled into Triton's cache on disk, before CUDA is used."""
    began = time.perf_counter()
    cuts = {problem: candidates(problem, PROCESSORS)[: args.most] for problem in problems(args.layers, args.batches)}
    unique = dict.fromkeys((problem.layer, cut) for problem in cuts for cut in cuts[problem])
    nodes = (decode_node(layer.shape, 4, splits, HOPPER, tile) for layer, (splits, tile) in unique)
    count = precompile_all(nodes, HOPPER, args.workers)
    print(f"{count} variants compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return cuts


def on_gpu(args: argparse.Namespace, out: TextIO) -> None:
    """Compile, compare, time."""
    began = time.perf_counter()
    cuts = compiled_ahead(args)
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != HOPPER:
        print(f"compiled ahead for {HOPPER}, but this GPU is {torch.cuda.get_device_capability()}")
    bench = Bench(device, out, began + args.seconds)
    print(f"{torch.cuda.get_device_name()}; floors at {READ_RATE / 1e12} TB/s", flush=True)
    largest = max(problem.bytes for problem in cuts)
    memory = torch.randn((2 * max(largest, IN_TURN)), device=device, dtype=torch.bfloat16).mul_(256**-0.25)
    for problem, tried in cuts.items():
        write(bench.problem(problem, tried, memory), out)
    print(f"{time.perf_counter() - began:.0f} s in all, {bench.skipped} cuts left out", flush=True)


def dry(out: TextIO) -> None:
    """Every layer, head dims cut to a sixteenth, on the CPU."""
    bench = Bench(torch.device("cpu"), out, math.inf)
    for layer in LAYERS:
        small = replace(layer, d=layer.d // 16, pairs=layer.pairs // 16, window=64 if layer.window else None)
        for rows in BATCHES:
            assert 1 <= len(candidates(Problem(layer, rows, 1024), 132)) <= CANDIDATES
        problem = Problem(small, 2, 70)
        write(bench.problem(problem, candidates(problem, 8)[:2], None), out)


def write(rows: Iterator[dict[str, Any]], out: TextIO) -> None:
    """JSON lines to `out`, the best to people."""
    done = []
    for row in rows:
        out.write(json.dumps(row) + "\n")
        done.append(row)
    out.flush()
    print(best_line(done), flush=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", nargs="*", default=[], choices=[layer.name for layer in LAYERS])
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--most", type=int, default=CANDIDATES, help="cuts a problem")
    parser.add_argument("--seconds", type=float, default=150, help="after so many the default cut alone is measured")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that compile")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    with args.out.open("w") as out:
        if args.dry:
            dry(out)
        else:
            on_gpu(args, out)


if __name__ == "__main__":
    main()
