"""All products of a decode step in one captured graph, with stand-ins of known length for what lies between them.

Every weight of the rank is read once. Attention and the two joints of a layer (sum over ranks, norms, residual) are kernels that
wait for their predecessors, let their dependents start, and spin: what a step takes beyond the products alone is what programmatic
dependent launch could not hide. The figures to reproduce: 4.39 to 4.42 ms for 31B at TP=4 with 6 us and 5 us.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deploy.models.public_shapes import ModelShape as Model
from kernels.launch import INTERPRET, launch, trigger, wait
from kernels.linear import _run
from kernels.tiles import GemmShape, Tile, choose
from tests.bench.gemms import GemmCase, candidates, describe
from tests.bench.timing import READ_RATE, seconds
from tests.support.engine.products import layer_products

Tiles = dict[tuple[str, GemmShape], Tile]
Launches = list[Callable[[], object]]


@dataclass(frozen=True)
class StandIns:
    """Microseconds of attention and of a joint; 0: left out."""

    attention: float = 6.0
    joint: float = 5.0


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
        self.tiles = {product: _chosen(product[1], rows) for layer in self._products for product in layer}
        self._weights = [[self._weight(shape) for _, shape in layer] for layer in self._products]
        shapes = [shape for _, shape in self.tiles]
        self._x = {shape.n: torch.empty(rows, shape.n, dtype=torch.bfloat16, device=device).normal_() for shape in shapes}
        self._out = {shape.m: torch.empty(rows, shape.m, dtype=torch.bfloat16, device=device) for shape in shapes}

    @property
    def weight_bytes(self) -> int:
        return sum(2 * weight.numel() for layer in self._weights for weight in layer)

    def launches(self, tiles: Tiles, stand_ins: StandIns) -> Launches:
        """One step: QKV, attention, O, joint, gate_up, down, joint of every layer, and the head."""
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
        attention, joint = (64, 4, stand_ins.attention), (1, 8, stand_ins.joint)
        after = [attention, joint, None, joint]
        for layer, weights in zip(self._products, self._weights, strict=True):
            for product, weight, gap in zip(layer, weights, after, strict=False):
                shape = product[1]
                yield partial(_run, tiles[product], self._x[shape.n], weight, self._out[shape.m], gated=shape.gated)
                if gap is not None and gap[2] and product[0] != "head":
                    yield partial(launch, _hold, (gap[0],), round(1e3 * gap[2]), warps=gap[1])


def stand_in_us(us: float, device: torch.device) -> float:
    """What a stand-in of `us` takes in a chain of its own."""
    steps = [partial(launch, _hold, (1,), round(1e3 * us), warps=8)] * 100
    steps[0]()
    return 1e6 * seconds(steps, device) / len(steps)


def chain_rows(chain: Chain, stand_ins: StandIns) -> Iterator[dict[str, Any]]:
    """The committed tiles and what each of their choices is worth: tiles before the wait, who triggers at its start."""
    tiles = chain.tiles
    starts = {product: replace(tile, start=True) for product, tile in tiles.items()}
    settings: list[tuple[str, Tiles, StandIns]] = [
        ("products alone", {}, StandIns(0, 0)),
        ("committed tiles", {}, stand_ins),
        ("joints of 3.5 us", {}, replace(stand_ins, joint=3.5)),
        ("nobody triggers at its start", {product: replace(tile, start=False) for product, tile in tiles.items()}, stand_ins),
        ("everybody triggers at its start", starts, stand_ins),
    ]
    for early in (1, 2, 4):
        changed = {product: replace(tile, early=early) for product, tile in tiles.items()}
        settings.append((f"{early} tiles early", changed, stand_ins))
    for setting, changed, between in settings:
        yield _row(chain, setting, chain.ms(changed, between), between)


def chain_cases(chain: Chain) -> Iterator[GemmCase]:
    """What `chain_rows` and `chain_sweep` launch of products, to be compiled ahead."""
    for (name, shape), chosen in chain.tiles.items():
        varied = [replace(chosen, early=early, start=start) for early in (1, 2, 4, chosen.early) for start in (False, True)]
        for tile in (*varied, *chain_candidates(shape, chain.rows)):
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


def chain_candidates(shape: GemmShape, rows: int) -> list[Tile]:
    """A sweep's candidates; at one row only those that hold weights in registers."""
    return [tile for tile in candidates(shape, rows) if rows > 1 or tile.kind == "gemv"]


def _chosen(shape: GemmShape, rows: int) -> Tile:
    tile = choose(rows, shape)
    assert tile is not None, f"{shape} at {rows} rows is cuBLAS's"
    return tile


def _row(chain: Chain, setting: str, ms: float, stand_ins: StandIns) -> dict[str, Any]:
    floor = 1e3 * chain.weight_bytes / READ_RATE
    return {
        "chain": setting,
        "rows": chain.rows,
        "ms": round(ms, 3),
        "floor_ms": round(floor, 3),
        "attention_us": stand_ins.attention,
        "joint_us": stand_ins.joint,
    }
