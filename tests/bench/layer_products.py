"""A step's products, experts and fused norms, all layers in one CUDA graph: `python -m tests.bench.layer_products --help`.

Prints microseconds a layer, by the tiles in force and by others in their place (--try). A product alone misleads: what is asked
for before a kernel's wait, and whose place the next kernel's CTAs take, shows beside its neighbours. Graphs are replayed by turns,
so that a GPU that lowers its clock does so for all; of eight turns the fastest and the median are shown.

    --try gate_up:64,64,4            64 outputs a CTA, 64 columns a turn, 4 stages; `,swap`: the weight is the MMA's left operand
    --try down:64,128,3,splits=8     the inner dimension in eight parts;  down:cublas: the library
    --try experts_up:64,128,4,swap   of the experts' gate and up, of as many rows as in force;  experts_down: of their down
    --try experts_down:256,64,4,warps=8+o_full:64,128,8,rows=16     rows a CTA, by default all
    --try down:gemv,4,2048,3         of one and two rows: 4 outputs a CTA, 2048 columns a turn, 3 turns asked for early

    --weights fp8 | int4             matrices in fp8, and rows of x packed by each product; in int4, groups of 32

Tokens choose experts at random. Norms read no other rank's part: what --tp cuts is cut, and its sums take no time. --dry: small,
under Triton's interpreter.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from kernels import experts, linear
from kernels.experts import choose as experts_in_force
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from kernels.launch import INTERPRET, on_second_stream
from kernels.packed import Load, Matrix, PackedMatrix, fp8_matrix, packed_matrix
from kernels.route import route, router_logits, router_parts
from kernels.tiles import GemmShape, Tile, choose
from tests.bench.timing import precompile_all
from tests.nano.model_shapes import PUBLIC, ModelShape
from tests.support.engine.products import layer_products
from tests.support.launches import record

TURNS, REPLAYS, EPS = 8, 4, 1e-6
PARTS = ("o_sliding", "o_full", "down")  # may be left in parts for the fused norm, where there is one rank
EXPERTS = ("experts_up", "experts_down")
Tiles = dict[GemmShape | str, Tile | None]


def random_int4(like: Tensor) -> PackedMatrix:
    """Random words of a matrix's shape, in groups of 32, with products of its size."""
    *experts, m, n = like.shape
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (*experts, m, n // 8), dtype=torch.int32, device=like.device)
    return PackedMatrix(words, like.new_full((*experts, m, n // 32), n**-0.5 / 4.6), "int4")


PACKERS: dict[Load, Callable[[Tensor], Matrix]] = {"plain": packed_matrix, "fp8": fp8_matrix, "int4": random_int4}


class MoeLayer:
    """A layer's router and experts with random weights, one rank's share of `tp`."""

    def __init__(self, model: ModelShape, tp: int, draw: Callable[..., Tensor], pack: Callable[[Tensor], Matrix]) -> None:
        n, m, self.top_k = model.hidden, model.moe_mlp // tp, model.top_k
        self.norm = torch.ones_like(draw(n))
        self.scale = torch.ones_like(draw(model.experts)).float()
        self.parts = router_parts(draw(model.experts, n).float(), torch.ones_like(self.norm).float())
        self.gate_up, self.down = pack(draw(model.experts, 2 * m, n) * n**-0.5), pack(draw(model.experts, n, m) * m**-0.5)

    def run(self, residual: Tensor, x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
        """The dense MLP of x, and beside it the experts."""
        dense = on_second_stream(lambda: linear.linear(linear.linear(x, gate_up, linear.GEGLU), down), x)
        logits, inner = router_logits(residual, self.parts, self.norm, EPS)
        weights, chosen = route(logits, self.scale, self.top_k)
        return experts.experts(inner, weights, chosen, self.gate_up, self.down, dense)


class Chain:
    """A model's first layers with random weights, one rank's share of `tp`, on `device`."""

    def __init__(self, model: ModelShape, tp: int, layers: int, device: torch.device, load: Load = "plain") -> None:
        self.tp, self.device = tp, device
        draw = partial(torch.empty if device.type == "meta" else torch.randn, device=device, dtype=torch.bfloat16)
        shapes = [shape for layer in range(layers) for shape in layer_products(model, layer, tp)]
        pack = PACKERS[load]
        self.products = [(name, shape, pack(draw(shape.m * (1 + shape.gated), shape.n) * shape.n**-0.5)) for name, shape in shapes]
        self.norms = Norms(torch.ones_like(draw(model.hidden)), torch.ones_like(draw(model.hidden)))
        self.inputs: Callable[[int, int], Tensor] = draw
        self.hidden = model.hidden
        self.experts = [MoeLayer(model, tp, draw, pack) for _ in range(layers if model.experts else 0)]

    def prepare(self, rows: int) -> dict[int, Tensor]:
        """Inputs of so many rows, by width."""
        return {width: self.inputs(rows, width) for width in {self.hidden, *(shape.n for _, shape, _ in self.products)}}

    def run(self, inputs: dict[int, Tensor]) -> Tensor:
        """One step's residual."""
        residual = x = inputs[self.hidden]
        out, products, layers = x, iter(self.products), iter(self.experts)
        for name, shape, weight in products:
            source = x if shape.n == self.hidden else out if out.shape[1:] == (shape.n,) else inputs[shape.n]
            norms = self.norms
            if shape.gated and self.experts:
                *_, down = next(products)
                out, norms = next(layers).run(residual, source, weight, down), norms._replace(halves=(norms.post, norms.post))
            elif shape.gated:
                out = linear.linear(source, weight, linear.GEGLU)
            elif name == "ple_gate":
                out = linear.linear(source, weight, linear.gelu_times(inputs[shape.m]))
            else:
                out = (linear.linear_parts if self.tp == 1 and name in PARTS else linear.linear)(source, weight)
            if norms.halves or shape.m == self.hidden:
                residual, normed = fused_allreduce_norm(out, residual, norms, EPS)
                x = residual if normed is None else normed
        return residual


@contextmanager
def tiles_of(tried: Tiles) -> Iterator[None]:
    """Inside the `with` these shapes take these tiles, others those in force."""

    def chosen(rows: int, shape: GemmShape, shared: int, *, parts: bool = False, load: Load = "plain") -> Tile | None:
        tile = tried.get(shape)
        if shape not in tried or (tile is not None and (rows <= 2) != (tile.kind == "gemv")):
            return choose(rows, shape, shared, parts=parts, load=load)
        if tile is not None and tile.kind == "gemv":
            return replace(tile, rows=rows)
        return tile and replace(tile, rows=tile.rows or max(16, 1 << (rows - 1).bit_length()), splits=tile.splits if parts else 1)

    def of_experts(assignments: int, count: int, shared: int, load: Load) -> tuple[Tile, ...]:
        pair = zip(EXPERTS, experts_in_force(assignments, count, shared, load), strict=True)
        return tuple(replace(tried.get(name) or tile, rows=tile.rows) for name, tile in pair)

    with mock.patch.object(linear, "choose", chosen), mock.patch.object(experts, "choose", of_experts):
        yield


def parse(text: str, chain: Chain) -> Tiles:
    """A `--try`, or several of them with `+` between."""
    if "+" in text:
        return {shape: tile for part in text.split("+") for shape, tile in parse(part, chain).items()}
    name, _, form = text.partition(":")
    keys = {shape for known, shape, _ in chain.products if known == name} or {name}.intersection(EXPERTS if chain.experts else ())
    if not keys:
        raise SystemExit(f"--try {text}: the products are {', '.join(dict.fromkeys(known for known, *_ in chain.products))}")
    if form == "cublas":
        return dict.fromkeys(keys)
    if form.startswith("gemv,"):
        bn, bk, early, *warps = map(int, form.split(",")[1:])
        return dict.fromkeys(keys, Tile("gemv", 1, bn, bk, early, *warps))
    bn, bk, stages, *more = form.split(",")
    tile = Tile("gemm", 0, int(bn), int(bk), stages=int(stages), swap="swap" in more)
    numbers = {field: int(number) for field, _, number in (option.partition("=") for option in more) if number}
    return dict.fromkeys(keys, replace(tile, **numbers))


def graph_of(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Captures `run`, once run."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, of a few back to back."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(REPLAYS):
        graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / REPLAYS


def measure(chain: Chain, rows: int, tried: dict[str, Tiles], layers: int) -> str:
    """The line of one number of rows. AssertionError: another tile gives another residual."""
    inputs, graphs, want = chain.prepare(rows), {}, None
    for name, tiles in tried.items():
        with tiles_of(tiles):
            residual = chain.run(inputs).float()
            want = residual if want is None else want
            assert float((residual - want).norm() / want.norm()) < 0.1, name
            if chain.device.type == "cuda":
                graphs[name] = graph_of(partial(chain.run, inputs))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _, name in product(range(TURNS), graphs):
        times[name].append(1e3 * milliseconds(graphs[name]) / layers)
    shown = [f"{name} {min(us):.2f} ({statistics.median(us):.2f})" for name, us in times.items()]
    return f"{rows} rows, us a layer: {'; '.join(shown) or 'not on this device'}"


@torch.inference_mode()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="31b", choices=sorted(PUBLIC))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=12, help="the model's first (default: %(default)s)")
    parser.add_argument("--try", dest="tried", action="append", default=[], metavar="PRODUCT:FORM")
    parser.add_argument("--weights", choices=list(PACKERS), default="plain")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    model = PUBLIC[args.model]
    if args.dry and not INTERPRET:
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tests.bench.layer_products", *sys.argv[1:]])
    if args.dry:
        small = {"hidden": 128, "mlp": 64 * args.tp, "heads": args.tp, "kv_heads": args.tp, "moe_mlp": 32 * args.tp}
        model = replace(model, groups=1, sliding=1, kv_shared=0, ple=0, experts=min(model.experts, 8), **small)
    layers = min(args.layers, model.layers)
    made = partial(Chain, model, args.tp, layers, load=args.weights)
    listed = made(torch.device("meta"))
    tried = {"in force": {}} | {text: parse(text, listed) for text in args.tried}
    if not args.dry:
        with record((9, 0)) as nodes:
            for rows, tiles in product(args.rows, tried.values()):
                with tiles_of(tiles):
                    listed.run(listed.prepare(rows))
        print(precompile_all(nodes, (9, 0)), "variants", flush=True)
    chain = made(torch.device("cpu" if args.dry else "cuda"))
    for rows in args.rows:
        print(measure(chain, rows, tried, layers), flush=True)


if __name__ == "__main__":
    main()
