"""Verify attention at ranks' real shapes, by the cut in force and the best of those tried: `python -m tests.bench.verify_cuts`.

Launches follow one another in a CUDA graph, over pools that are together larger than the L2 cache, with the launch that adds
the parts. Each cut is compared with plain torch first. `--cpu`: small, under Triton's interpreter, without figures that matter.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from kernels.decode import DecodeScratch
from kernels.launch import plain_torch
from kernels.tiles import LARGE_SHARED
from kernels.verify import VerifyTile, verify_attention, verify_cut
from tests.bench.attention import IN_TURN, PAGE, PROCESSORS, TOLERANCE, error
from tests.bench.timing import READ_RATE, launch_us, precompile_all
from tests.support.attention import Shape
from tests.support.launches import Node, record

Cut = tuple[int, VerifyTile]
SPLITS = (1, 2, 3, 4, 6, 8, 11, 17, 33)


@dataclass(frozen=True)
class VerifyLayer:
    """A rank's share of a layer, the queries of a row, and the batches and context that are measured."""

    name: str
    shape: Shape
    queries: int
    batches: tuple[int, ...] = (1, 8, 32, 100)
    context: int = 1024

    def cut(self, rows: int, pages: int) -> Cut:
        """The one in force."""
        shape = self.shape
        group = shape.heads // shape.kv_heads * self.queries
        return verify_cut(rows, shape.kv_heads, group, shape.d, PAGE, pages, PROCESSORS, 2, LARGE_SHARED)

    def tiles(self) -> Iterator[VerifyTile]:
        """Tiles worth trying: 16 to 80 sums a thread, and shared memory that there is."""
        lanes, d = self.cut(1, 1)[1].rows, self.shape.d
        for keys, warps, stages, values in product((32, 64), (4, 8), (2, 3, 4), (1, 2, 4)):
            tile = VerifyTile(lanes, keys, values, warps, stages)
            if 16 <= lanes * d / values / (32 * warps) <= 80 and tile.shared_bytes(d) <= LARGE_SHARED:
                yield tile


LAYERS = (
    VerifyLayer("e2b-sliding", Shape(8, 1, 256, 128, window=512, page=PAGE), 3),
    VerifyLayer("e2b-full", Shape(8, 1, 512, 64, page=PAGE), 3),
    VerifyLayer("31b-tp2-sliding", Shape(16, 8, 256, 128, window=1024, page=PAGE), 6),
    VerifyLayer("31b-tp2-full", Shape(16, 2, 512, 64, page=PAGE), 6),
    VerifyLayer("31b-tp2-full-8k", Shape(16, 2, 512, 64, page=PAGE), 6, (1, 8), 8192),
    VerifyLayer("31b-tp4-sliding", Shape(8, 4, 256, 128, window=1024, page=PAGE), 6, (1, 8, 32, 64)),
    VerifyLayer("31b-tp4-full", Shape(8, 1, 512, 64, page=PAGE), 6, (1, 8, 32, 64)),
    VerifyLayer("26b-tp1-sliding", Shape(16, 8, 256, 128, window=1024, page=PAGE), 5, (1, 5, 16, 48)),
    VerifyLayer("26b-tp1-full", Shape(16, 2, 512, 64, page=PAGE), 5, (1, 5, 16, 48)),
)


class VerifyInputs:
    """Random inputs of `rows` rows of a layer, for launches over `copies` pools in turn."""

    def __init__(self, layer: VerifyLayer, rows: int, device: torch.device) -> None:
        shape, queries = layer.shape, layer.queries
        starts = [layer.context + 17 + 13 * row % 48 for row in range(rows)]
        firsts = [0 if shape.window is None else max(0, start - shape.window + 1) // PAGE for start in starts]
        self.pages = max((start + queries - 1) // PAGE - first + 1 for start, first in zip(starts, firsts, strict=True))
        pool = 2 * (rows * self.pages + 1) * shape.kv_heads * PAGE * shape.d
        self.copies = max(1, min(64, IN_TURN // (2 * pool))) if device.type == "cuda" else 1
        draw = partial(torch.randn, device=device) if device.type != "meta" else partial(torch.empty, device=device)
        self.layer, scale = layer, shape.d**-0.25
        pools = self.copies, rows * self.pages + 1, 2, shape.kv_heads, PAGE, shape.d
        self.pools = draw(pools).mul(scale).to(torch.bfloat16 if device.type != "cpu" else torch.float32)
        self.q = draw((rows * queries, shape.heads, shape.d)).mul(scale).to(self.pools.dtype)
        self.out = torch.empty_like(self.q)
        self.page_ids = torch.arange(1, rows * self.pages + 1, dtype=torch.int32, device=device).view(rows, -1)
        positions = [start + query for start in starts for query in range(queries)]
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        parts = rows * queries * max(SPLITS)
        self.scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, parts, device)

    def run(self, splits: int, tile: VerifyTile | None, copy: int = 0) -> None:
        """One launch."""
        reads = self.q, self.pools[copy], self.page_ids, self.positions, self.layer.shape.window
        verify_attention(*reads, self.scratch, self.out, splits, tile)

    def us(self, cut: Cut) -> float:
        """Microseconds a launch, whose result is right."""
        with plain_torch():
            self.run(1, None)
        want = self.out.clone()
        self.out.fill_(torch.nan)
        self.run(*cut)
        assert error(self.out, want) < TOLERANCE, (self.layer, cut)
        launches = [partial(self.run, *cut, turn % self.copies) for turn in range(max(16, self.copies))]
        return launch_us(launches if self.out.is_cuda else launches[:1], self.out.device)


def nodes(layer: VerifyLayer) -> list[Node]:
    """The launches of every tile, for Hopper."""
    with record((9, 0)) as listed:
        inputs = VerifyInputs(layer, 1, torch.device("meta"))
        for tile in layer.tiles():
            inputs.run(2, tile)
    return listed


def measure(layer: VerifyLayer, rows: int, device: torch.device, seconds: float) -> str:
    """Times the cut in force and the others, for at most so many seconds."""
    inputs, deadline = VerifyInputs(layer, rows, device), time.monotonic() + seconds
    splits, tile = layer.cut(rows, inputs.pages)
    if device.type == "cpu":
        tile = VerifyTile(tile.rows, 16, 1, 4, 2)
    used, times = inputs.us((splits, tile)), {}
    for cut in product((count for count in SPLITS if count <= inputs.pages), layer.tiles()):
        if time.monotonic() < deadline and rows * layer.shape.kv_heads * cut[0] * cut[1].values <= 12 * PROCESSORS:
            times[cut] = inputs.us(cut)
    floor = 1e6 * inputs.pools[0].numel() * inputs.pools.element_size() / READ_RATE
    best = min(times, key=lambda cut: times[cut], default=(splits, tile))
    fastest = f"best {times.get(best, used):.1f} by {best}"
    return f"{layer.name} b{rows}: {used:.1f} us by {splits} splits, {tile}; pages alone {floor:.1f}; {fastest}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", nargs="*", default=[], help="whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a batch's cuts")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    layers = [layer for layer in LAYERS if not args.layers or any(part in layer.name for part in args.layers)]
    if args.cpu:
        shrunk = [replace(layer.shape, d=16, window=layer.shape.window and 64) for layer in layers]
        layers = [replace(layer, shape=shape, context=70) for layer, shape in zip(layers, shrunk, strict=True)]
    else:
        print(precompile_all((node for layer in layers for node in nodes(layer)), (9, 0), 16), "variants", flush=True)
    for layer in layers:
        for rows in layer.batches[: 1 if args.cpu else None]:
            print(measure(layer, rows, torch.device("cpu" if args.cpu else "cuda"), 0 if args.cpu else args.seconds), flush=True)


if __name__ == "__main__":
    main()
