"""The head's logits in bf16, and in fp8 with the best of each row from the plain table: `python -m tests.bench.recheck --help`.

Microseconds of a launch in a graph: `plain`, `fp8` without the recheck, and with it; with --sweep the fp8 product by other tiles.
Stops if a greedy choice differs. Without a GPU each runs once.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.launch import plain_torch
from kernels.linear import FP32, linear
from kernels.packed import E4M3, PackedMatrix, fp8_matrix
from kernels.recheck import recheck
from kernels.tiles import GemmShape, Tile
from tests.bench.layer_products import tiles_of
from tests.bench.record import Row, add_record_option, append
from tests.bench.timing import FAILURES, microseconds, precompile_all
from tests.support.launches import record

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
_DRAWN = 1 << 15  # rows of a table at once
GEMVS = [Tile("gemv", 1, bn, bk, early) for bn, bk, early in ((4, 1024, 4), (8, 1024, 3), (4, 2048, 2), (8, 2048, 2), (2, 2048, 3))]
GEMMS = [
    Tile("gemm", 0, bn, bk, stages=stages, swap=swap)
    for bn, bk, stages, swap in (
        (64, 256, 6, True), (64, 256, 4, True), (64, 128, 6, True), (128, 256, 3, False), (128, 128, 4, False), (128, 128, 4, True),
        (128, 256, 3, True),
    )
]  # fmt: skip


def tables(vocabulary: int, hidden: int) -> tuple[Tensor, PackedMatrix]:
    """A random table, and the same in e4m3."""
    table = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device=DEVICE)
    parts = [fp8_matrix(rows.normal_(std=hidden**-0.5)) for rows in table.split(_DRAWN)]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return table, PackedMatrix(values, torch.cat([part.tensors[1] for part in parts]), "fp8")


def checked(x: Tensor, table: Tensor, packed: PackedMatrix) -> None:
    """AssertionError: a greedy choice differs that is no tie, or one logit of the best is not the table's."""
    near = linear(x, packed, FP32)
    found = near.clone()
    recheck(found, x, table)
    with plain_torch():
        expected = near.clone()
        recheck(expected, x, table)
        exact = linear(x, table, FP32)
    off = float((found - expected).abs().max())
    best = found.argmax(1, keepdim=True)
    lost = float((exact.amax(1, keepdim=True) - exact.gather(1, best)).max())
    changed = (found != near).sum(1).float()
    differ = float((near.argmax(1) != exact.argmax(1)).float().mean())
    print(f"  rechecked {changed.mean():.0f} ids a row, most {changed.max():.0f}; off {off:.1e}; greedy loses {lost:.1e},"
          f" without the recheck {100 * differ:.0f} % differ")  # fmt: skip
    assert off < 1e-3, off
    assert lost < 1e-3, lost


def rechecked(x: Tensor, table: Tensor, packed: PackedMatrix) -> Tensor:
    logits = linear(x, packed, FP32)
    recheck(logits, x, table)
    return logits


def time_us(launch: Callable[[], object]) -> float:
    if GPU:
        return microseconds(launch, DEVICE)
    launch()
    return 0.0


def tried(rows: int) -> list[Tile]:
    return GEMVS if rows <= 2 else [replace(tile, rows=max(16, 1 << (rows - 1).bit_length())) for tile in GEMMS]


def compile_all(args: argparse.Namespace) -> None:
    """Every tile's product, in parallel."""
    meta = partial(torch.empty, device="meta")
    shape = GemmShape(args.vocabulary, args.hidden)
    packed = PackedMatrix(meta(tuple(shape[:2]), dtype=E4M3), meta(shape.m), "fp8")
    with record((9, 0)) as nodes:
        for rows in args.rows:
            for tile in tried(rows):
                with tiles_of({(shape, tile.kind): tile}):
                    linear(meta((rows, args.hidden), dtype=torch.bfloat16), packed, FP32)
    print(precompile_all(nodes, (9, 0)), "variants", flush=True)


def sweep(x: Tensor, packed: PackedMatrix) -> None:
    """A line a tile."""
    for tile in tried(len(x)):
        try:
            with tiles_of({(GemmShape(*packed.values.shape), tile.kind): tile}):
                us = time_us(lambda: linear(x, packed, FP32))
        except FAILURES as error:
            print(f"  {tile}: {type(error).__name__}", flush=True)
            continue
        print(f"  {tile.kind} {tile.bn},{tile.bk},{tile.early or tile.stages}{',swap' * tile.swap}: {us:.1f} us", flush=True)


@torch.inference_mode()
def main() -> None:
    """A line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--sweep", action="store_true")
    add_record_option(parser)
    args = parser.parse_args()
    if args.sweep and GPU:
        compile_all(args)
    table, packed = tables(args.vocabulary, args.hidden)
    measured: list[Row] = []
    for rows in args.rows:
        x = torch.randn(rows, args.hidden, device=DEVICE).to(table.dtype)
        times = {
            "plain": time_us(lambda: linear(x, table, FP32)),  # noqa: B023 (launched at once)
            "fp8": time_us(lambda: linear(x, packed, FP32)),  # noqa: B023
            "fp8-rechecked": time_us(lambda: rechecked(x, table, packed)),  # noqa: B023
        }
        print(f"{rows:3} rows x {args.hidden}: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()), flush=True)
        checked(x, table, packed)
        if args.sweep:
            sweep(x, packed)
        measured += [(f"head-{rows}x{args.hidden}-{name}", "in a graph", us, "us") for name, us in times.items()]
    append(measured, args.record, "tests.bench.recheck")


if __name__ == "__main__":
    main()
