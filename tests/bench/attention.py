"""Decode attention at ranks' real shapes, by the cut in force and the best of those tried: `python -m tests.bench.attention`.

Each launch follows a product in a CUDA graph under programmatic dependent launch, as in a step, over pools and weights that are
together larger than the L2 cache; the products' own time is taken off. Of launches that follow one another other cuts are the
best than in a step. Each cut is compared with plain torch first. Variants are compiled beforehand by as many processes as there
are cores. --cpu: small, in plain torch, without figures that matter. `tests.bench.verify_cuts` measures rows of several queries
likewise.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kernels.decode import DecodeScratch, DecodeTile, decode_attention, decode_splits, decode_tile
from kernels.launch import plain_torch
from kernels.linear import linear
from kernels.qkv import replace_unturned
from kernels.tiles import LARGE_SHARED
from tests.bench.timing import FAILURES, READ_RATE, launch_us, precompile_all
from tests.support.attention import E4M3, EPS, OUTSIDE, Shape
from tests.support.launches import Node, record

PAGE = 32
HOPPER, PROCESSORS = (9, 0), 132  # what variants are compiled for
HIDDEN = 4096  # outputs of the products between launches
IN_TURN = 256 << 20  # bytes of pools that launches read in turn: several times the L2 cache
TOLERANCE = 1e-2  # relative error of bf16 attention against plain torch: 2e-3 is usual

Cut = tuple[int, Any]  # splits and tile
Draw = partial[Tensor]


@dataclass(frozen=True)
class Layer:
    """One rank's share of a layer, and the batches and context that are measured; rows' lengths differ by less than two pages."""

    name: str
    shape: Shape
    context: int = 1024
    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 100)
    queries: int = 1  # of a row
    itemsize: int = 2  # bytes of a number in pages; 1: e4m3

    def starts(self, rows: int) -> list[int]:
        """The position of each row's first query."""
        return [self.context + 17 + 13 * row % 48 for row in range(rows)]

    def pages(self, rows: int) -> int:
        """Pages of the longest row."""
        window = self.shape.window or 1 << 30
        return max((start + self.queries - 1) // PAGE - max(0, start - window + 1) // PAGE + 1 for start in self.starts(rows))

    def cut(self, rows: int, pages: int) -> Cut:
        """The one in force."""
        shape = self.shape
        splits = decode_splits(rows, shape.heads // shape.kv_heads, shape.kv_heads, shape.d, pages, PROCESSORS)
        form = shape.d, PAGE, rows * shape.kv_heads * splits, -(-pages // splits), self.itemsize, LARGE_SHARED
        return splits, decode_tile(*form, shape.read_pairs)

    def others(self, rows: int, pages: int) -> Iterator[Cut]:
        """Cuts worth trying, the likeliest first: splits that leave no CTA a page more than needed."""
        few = (1, 2, 3, 4, 5, 6, 8, 11, 17, 24, 33, 48, 64)
        even = {-(-pages // -(-pages // n)) for n in few if n <= pages}
        near = sorted(even, key=lambda n: abs(math.log(n / self.cut(rows, pages)[0])))
        for n, tile in product(near[:5], _tiles(self.shape, self.itemsize)):
            if tile.values == 1 or rows * self.shape.kv_heads * n * tile.values <= 2 * PROCESSORS:
                yield n, replace(tile, early=2 * n >= pages and tile.keys == PAGE)

    def given(self, rows: int, draw: Draw) -> tuple[Tensor, ...]:
        """What `attend` reads beside pages: the raw product, cosines and sines, and norms."""
        shape = self.shape
        angles = draw((rows, shape.pairs)).float()
        norms = [(1 + 0.1 * draw(shape.d)) * shape.d**-0.25 for _ in "qk"]
        qkv = draw((rows, (shape.heads + shape.kv_projections * shape.kv_heads) * shape.d))
        return qkv, torch.cat([angles.cos(), angles.sin()], 1), *norms

    def attend(self, it: "Inputs", pool: Tensor, splits: int, tile: Any) -> None:
        """One launch."""
        (qkv, cos_sin, q_norm, k_norm), window, out = it.given, self.shape.window, it.out.flatten(1)
        rows = it.page_ids, it.positions, cos_sin
        decode_attention(qkv, pool, *rows, q_norm, k_norm, EPS, window, it.scratch, out, splits, tile)


def _tiles(shape: Shape, itemsize: int) -> list[DecodeTile]:
    if itemsize == 1 and shape.d <= 256:
        tiles = [(2 * PAGE, 1, 4, 2), (PAGE, 1, 4, 3), (PAGE, 1, 4, 5), (2 * PAGE, 1, 8, 3), (2 * PAGE, 2, 4, 3)]
    elif itemsize == 1:
        tiles = [(PAGE, 1, 8, 3), (PAGE, 1, 8, 5), (PAGE, 2, 4, 3), (PAGE, 1, 4, 3), (2 * PAGE, 1, 8, 3)]
    elif shape.d <= 256:
        tiles = [(PAGE, 1, 4, 3), (16, 1, 4, 3), (PAGE, 1, 4, 2), (2 * PAGE, 1, 4, 2), (PAGE, 2, 4, 2)]
    else:
        tiles = [(PAGE, 1, 4, 3), (PAGE, 2, 4, 2), (PAGE, 1, 4, 2), (PAGE, 4, 4, 2), (2 * PAGE, 1, 8, 2), (PAGE, 4, 8, 3)]
    return [DecodeTile(*tile, early=False, pairs=shape.read_pairs * (tile[1] == 1)) for tile in tiles]


LAYERS = (
    Layer("31b-tp4-sliding", Shape(8, 4, 256, 128, window=1024)),
    Layer("31b-tp4-full", Shape(8, 1, 512, 64, 1)),
    Layer("31b-tp4-full-8k", Shape(8, 1, 512, 64, 1), 8192, (1, 8, 32, 100)),
    Layer("26b-tp1-sliding", Shape(16, 8, 256, 128, window=1024)),
    Layer("26b-tp1-full", Shape(16, 2, 512, 64, 1)),
    Layer("26b-tp1-full-8k", Shape(16, 2, 512, 64, 1), 8192, (1, 8, 32, 100)),
    Layer("e2b-tp1-sliding", Shape(8, 1, 256, 128, window=512)),
)
E4M3_LAYERS = (
    Layer("31b-tp1-sliding", Shape(32, 16, 256, 128, window=1024), batches=(1, 32, 100)),
    Layer("31b-tp1-sliding-e4m3", Shape(32, 16, 256, 128, window=1024), batches=(1, 8, 32, 100), itemsize=1),
    Layer("31b-tp1-full-e4m3", Shape(32, 4, 512, 64), batches=(1, 32, 100), itemsize=1),
    Layer("31b-tp1-full-8k-e4m3", Shape(32, 4, 512, 64), 8192, (1, 32), itemsize=1),
)


class Inputs:
    """Random inputs of `rows` rows of a layer, for launches over some pools in turn; the cut in force is the first of `cuts`."""

    def __init__(self, layer: Layer, rows: int, device: torch.device) -> None:
        shape, pages = layer.shape, layer.pages(rows)
        self.layer, self.cuts = layer, list(dict.fromkeys([layer.cut(rows, pages), *layer.others(rows, pages)]))
        pool = rows * pages + 1, 2, shape.kv_heads, PAGE, shape.d
        copies = max(1, min(96, IN_TURN // (layer.itemsize * math.prod(pool)))) if device.type == "cuda" else 1
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        draw: Draw = partial(torch.empty if device.type == "meta" else torch.randn, device=device, dtype=dtype)
        self.pools = draw((copies, *pool)).mul_(shape.d**-0.25)
        self.page_ids = torch.full((rows, -(-pages // 16) * 16), OUTSIDE, dtype=torch.int32, device=device)
        self.page_ids[:, :pages] = 1 + torch.randperm(rows * pages, device=device).view(rows, -1)
        positions = [start + query for start in layer.starts(rows) for query in range(layer.queries)]
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        self.given, self.out = layer.given(len(positions), draw), draw((len(positions), shape.heads, shape.d))
        self.weights = draw((copies, HIDDEN, shape.heads * shape.d))
        if shape.read_pairs:
            k, v = self.pools.unbind(2)
            k.copy_(replace_unturned(k, v * self.given[-1], shape.pairs))
        if layer.itemsize == 1:
            self.pools = self.pools.to(E4M3)
        parts = len(positions) * max(splits for splits, _ in self.cuts)
        self.scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, parts, device)

    def run(self, cut: Cut, copy: int = 0) -> None:
        """One launch."""
        self.layer.attend(self, self.pools[copy], *cut)

    def us(self, cut: Cut) -> float:
        """Microseconds a launch, whose result is right."""
        with plain_torch():
            self.run((1, None))
        expected = self.out.clone()
        self.out.fill_(torch.nan)
        self.run(cut)
        off = error(self.out, expected)
        assert off < TOLERANCE, f"{self.layer} {cut}: relative error {off}"
        copies = len(self.pools)
        turns = range(max(16, copies) if self.out.is_cuda else 1)
        products = [partial(linear, self.out.flatten(1), self.weights[turn % copies]) for turn in turns]
        both = [launch for turn in turns for launch in (products[turn], partial(self.run, cut, turn % copies))]
        return 2 * launch_us(both, self.out.device) - launch_us(products, self.out.device)


def error(out: Tensor, expected: Tensor) -> float:
    """Relative, over the whole output; NaN counts as infinite."""
    value = float((out.float() - expected.float()).norm() / expected.float().norm())
    return math.inf if math.isnan(value) else value


def nodes(layers: Iterable[Layer]) -> list[Node]:
    """All launches that are measured."""
    with record(HOPPER) as listed:
        for inputs in (Inputs(layer, rows, torch.device("meta")) for layer in layers for rows in layer.batches):
            for cut in inputs.cuts:
                inputs.run(cut)
    return listed


def measure(layer: Layer, rows: int, device: torch.device, seconds: float) -> str:
    """Times the cut in force and the others, for at most so many seconds."""
    inputs, deadline = Inputs(layer, rows, device), time.monotonic() + seconds
    used, *others = inputs.cuts
    times = {used: inputs.us(used)}
    for cut in others:
        if time.monotonic() < deadline:
            with suppress(*FAILURES):  # one that does not fit ends no sweep; a wrong result does
                times[cut] = inputs.us(cut)
    of_keys = layer.shape.read_pairs / layer.shape.d or 0.5  # what is not read of V as well
    floor = 1e6 * inputs.pools[0].nbytes * (0.5 + of_keys) / READ_RATE
    best = min(times, key=lambda cut: times[cut])
    return f"{layer.name} b{rows}: {times[used]:.2f} us by {used}; pages alone {floor:.2f}; best {times[best]:.2f} by {best}"


def shrunk(layer: Layer) -> Layer:
    """For a CPU."""
    shape = layer.shape
    small = replace(shape, d=shape.d // 16, pairs=shape.pairs // 16, window=shape.window and 64)
    return replace(layer, shape=small, context=70, batches=(2,))


def main(layers: Sequence[Layer] = LAYERS, arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", nargs="*", default=[layer.name for layer in layers], help="whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a batch's cuts")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(arguments)
    chosen = [layer for layer in layers if any(part in layer.name for part in args.layers)]
    if args.cpu:
        chosen = [shrunk(layer) for layer in chosen]
    else:
        print(precompile_all(nodes(chosen), HOPPER), "variants", flush=True)
    for layer in chosen:
        for rows in layer.batches:
            print(measure(layer, rows, torch.device("cpu" if args.cpu else "cuda"), 0 if args.cpu else args.seconds), flush=True)


if __name__ == "__main__":
    main((*LAYERS, *E4M3_LAYERS))
