"""All products of a decode step in one captured graph, with stand-ins of known length for what lies between them.

Every weight of the rank is read once. Attention and the two fused norms of a layer (sum over ranks, norms, residual) are kernels
that wait for their predecessors, let their dependents start, and spin: what a step takes beyond the products alone is what
programmatic dependent launch could not hide. The figures to reproduce: 4.39 to 4.42 ms for 31B at TP=4 with 6 us and 5 us.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRET, launch, trigger, wait
from kernels.tiles import GemmShape, Tile, choose
from tests.bench.gemms import GemmCase, candidates, describe, multiply
from tests.bench.timing import READ_RATE, seconds
from tests.nano.model_shapes import ModelShape as Model
from tests.support.engine.products import layer_products

Tiles = dict[tuple[str, GemmShape], Tile | None]
EARLY = (1, 2, 4)
Launches = list[Callable[[], object]]


@dataclass(frozen=True)
class StandIns:
    """Microseconds of attention and of a fused norm; 0: left out."""

    attention: float = 6.0
    allreduce_norm: float = 5.0


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(nanoseconds: tl.tensor, PDL: tl.constexpr) -> None:
    """Takes part in the chain and keeps its CTAs for `nanoseconds`."""
    trigger(PDL)
    wait(PDL)
    if not INTERPRET:
        start = tl.extra.cuda.globaltimer()
        now = start
        while now - start < nanoseconds:
            now = tl.extra.cuda.globaltimer()


class Chain:
    """The products of a step of `rows` rows with weights of their own, on one device."""

    def __init__(self, model: Model, tp: int, rows: int, device: torch.device) -> None:
        self.device, self.rows = device, rows
        layers = [layer_products(model, layer, tp) for layer in range(model.layers)]
        self._products = [*layers, [("head", GemmShape(model.vocab // tp, model.hidden))]]
        self.tiles: Tiles = {product: choose(rows, product[1]) for layer in self._products for product in layer}
        self._weights = [[self._weight(shape) for _, shape in layer] for layer in self._products]
        shapes = [shape for _, shape in self.tiles]
        self._x = {shape.n: torch.empty(rows, shape.n, dtype=torch.bfloat16, device=device).normal_() for shape in shapes}
        self._out = {shape.m: torch.empty(rows, shape.m, dtype=torch.bfloat16, device=device) for shape in shapes}

    def changed(self, **change: Any) -> Tiles:
        """The committed tiles with one choice changed in all of them."""
        return {product: tile and replace(tile, **change) for product, tile in self.tiles.items()}

    @property
    def weight_bytes(self) -> int:
        return sum(2 * weight.numel() for layer in self._weights for weight in layer)

    def launches(self, tiles: Tiles, stand_ins: StandIns) -> Launches:
        """One step: QKV, attention, O, fused norm, gate_up, down, fused norm of every layer, and the head."""
        return list(self._step({**self.tiles, **tiles}, stand_ins))

    def ms(self, tiles: Tiles, stand_ins: StandIns) -> float:
        steps = self.launches(tiles, stand_ins)
        for step in steps:  # loads every kernel: a capture must not
            step()
        return 1e3 * seconds(steps, self.device)

    def _weight(self, shape: GemmShape) -> Tensor:
        m = shape.m * (2 if shape.gated else 1)
        return torch.empty(m, shape.n, dtype=torch.bfloat16, device=self.device).normal_(std=shape.n**-0.5)

    def _step(self, tiles: Tiles, stand_ins: StandIns) -> Iterator[Callable[[], object]]:
        attention, allreduce_norm = (64, 4, stand_ins.attention), (1, 8, stand_ins.allreduce_norm)
        after = [attention, allreduce_norm, None, allreduce_norm]
        for layer, weights in zip(self._products, self._weights, strict=True):
            for product, weight, gap in zip(layer, weights, after, strict=False):
                shape = product[1]
                yield partial(multiply, tiles[product], self._x[shape.n], weight, self._out[shape.m], shape.gated)
                if gap is not None and gap[2] and product[0] != "head":
                    yield partial(launch, _hold, (gap[0],), round(1e3 * gap[2]), warps=gap[1])


def stand_in_us(us: float, device: torch.device) -> float:
    """What a stand-in of `us` takes in a chain of its own."""
    steps = [partial(launch, _hold, (1,), round(1e3 * us), warps=8)] * 100
    steps[0]()
    return 1e6 * seconds(steps, device) / len(steps)


def chain_rows(chain: Chain, stand_ins: StandIns) -> Iterator[dict[str, Any]]:
    """The committed tiles and what each of their choices is worth: tiles before the wait, who triggers at its start, cuBLAS."""
    nothing = StandIns(0, 0)
    settings: list[tuple[str, Tiles, StandIns]] = [
        ("products alone", {}, nothing),
        ("cuBLAS alone", dict.fromkeys(chain.tiles), nothing),
        ("committed tiles", {}, stand_ins),
        ("cuBLAS", dict.fromkeys(chain.tiles), stand_ins),
        ("fused norms of 3.5 us", {}, replace(stand_ins, allreduce_norm=3.5)),
        ("nobody triggers at its start", chain.changed(start=False), stand_ins),
        ("everybody triggers at its start", chain.changed(start=True), stand_ins),
        *((f"{early} tiles early", chain.changed(early=early), stand_ins) for early in EARLY),
    ]
    for setting, changed, between in settings:
        yield _row(chain, setting, chain.ms(changed, between), between)


def chain_cases(chain: Chain) -> Iterator[GemmCase]:
    """What `chain_rows` and `chain_sweep` launch of products, to be compiled ahead."""
    changed: list[dict[str, Any]] = [{}, {"start": False}, {"start": True}, *({"early": early} for early in EARLY)]
    for (name, shape), chosen in chain.tiles.items():
        varied = [replace(chosen, **change) for change in changed] if chosen else []
        for tile in (*varied, *chain_candidates(shape, chain.rows)):
            if tile is not None:
                yield GemmCase(name, shape, chain.rows, tile)


def chain_sweep(chain: Chain, stand_ins: StandIns, only: str) -> Iterator[dict[str, Any]]:
    """One product after the other (of those whose name contains `only`) takes the candidate with which the whole step is shortest;
    the last row is the best step."""
    best, shortest = dict(chain.tiles), chain.ms({}, stand_ins)
    swept = [product for product in chain.tiles if only in product[0]]
    for product in sorted(swept, key=lambda product: -product[1].m * product[1].n):
        for tile in chain_candidates(product[1], chain.rows):
            ms = chain.ms({**best, product: tile}, stand_ins)
            yield _row(chain, f"{product[0]}: {describe(tile)}", ms, stand_ins)
            if ms < shortest:
                best[product], shortest = tile, ms
    for product, tile in best.items():
        yield {"chain": "best", "product": product[0], "m": product[1].m, "n": product[1].n, "tile": describe(tile)}
    yield _row(chain, "best tiles", chain.ms(best, stand_ins), stand_ins)


def chain_candidates(shape: GemmShape, rows: int) -> list[Tile | None]:
    """At one row a sweep's candidates that hold weights in registers. From two rows on those that ask for up to 8 tiles early: what
    a gap can bring to L2 is some 20 MB; and cuBLAS."""
    found = candidates(shape, rows)
    if rows == 1:
        return [tile for tile in found if tile.kind == "gemv"]
    plain = list(dict.fromkeys(replace(tile, early=0) for tile in found if tile.kind == "gemm"))
    early = [replace(tile, early=early) for tile in plain for early in (1, 4, 8)]
    return [None, *(tile for tile in found if tile.kind == "gemv"), *early]


def _row(chain: Chain, setting: str, ms: float, stand_ins: StandIns) -> dict[str, Any]:
    floor = 1e3 * chain.weight_bytes / READ_RATE
    return {
        "chain": setting,
        "rows": chain.rows,
        "ms": round(ms, 3),
        "floor_ms": round(floor, 3),
        "attention_us": stand_ins.attention,
        "allreduce_norm_us": stand_ins.allreduce_norm,
    }
