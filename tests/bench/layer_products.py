"""A step's products, experts and fused norms, all layers in one CUDA graph: `python -m tests.bench.layer_products --help`.

Prints microseconds a layer, by the tiles in force and by others in their place (--try). A product alone misleads: what is asked
for before a kernel's wait, and whose place the next kernel's CTAs take, shows beside its neighbours. Graphs are replayed by turns,
so that a GPU that lowers its clock does so for all; of eight turns the fastest and the median are shown.

    --try gate_up:64,64,4            64 outputs a CTA, 64 columns a turn, 4 stages; `,swap`: the weight is the MMA's left operand
    --try down:64,128,3,splits=8     the inner dimension in eight parts;  down:cublas: the library
    --try experts_up:64,128,4,swap   of the experts' gate and up, of as many rows as in force;  experts_down: of their down
    --try experts_down:256,64,4,warps=8+o_full:64,128,8,rows=16     rows a CTA, by default all
    --try down:gemv,4,2048,3         of one and two rows: 4 outputs a CTA, 2048 columns a turn, 3 turns asked for early
    --try down:gemv,warps=2          as in force of one and two rows, but with two warps
    --try down:bk=128,splits=3       likewise of more rows

    --weights fp8 | int4             matrices in fp8, rows of x packed as in the model: by norms, otherwise by the product; in int4
                                     by groups of 32

Tokens choose experts at random. Norms read no other rank's part: what --tp cuts is cut, and its sums take no time. --dry: small,
under Triton's interpreter.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
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
from kernels.packed import Activations, Load, Matrix, PackedMatrix, fp8_matrix, packed_matrix
from kernels.route import route, router_logits, router_parts
from kernels.tiles import GemmShape, Tile, choose, fit
from tests.bench.timing import precompile_all
from tests.nano.model_shapes import PUBLIC, ModelShape
from tests.support.engine.products import layer_products
from tests.support.launches import record

TURNS, REPLAYS, EPS = 8, 4, 1e-6
PARTS = ("o_sliding", "o_full", "down")  # may be left in parts for the fused norm, where there is one rank
FROM_NORM = ("gate_up", "ple_gate")  # as those of q, k and v
EXPERTS = ("experts_up", "experts_down")
TOP_K = PUBLIC["26b-a4b"].top_k  # the public model with experts
Changes = dict[str, int]  # of fields of the tile in force
Tiles = dict[tuple[GemmShape | str, str], Tile | Changes | None]  # by shape, or name of experts, and a kernel's kind


def random_int4(like: Tensor) -> PackedMatrix:
    """Random words of a matrix's shape, in groups of 32, with products of its size."""
    *experts, m, n = like.shape
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (*experts, m, n // 8), dtype=torch.int32, device=like.device)
    return PackedMatrix(words, like.new_full((*experts, m, n // 32), n**-0.5 / 4.6), "int4")


PACKERS: dict[Load, Callable[[Tensor], Matrix]] = {"plain": packed_matrix, "fp8": fp8_matrix, "int4": random_int4}


def gated(x: Activations, weight: Matrix) -> Activations:
    """Rows for a product with a matrix of the same kind."""
    if packed_matrix(weight).load == "fp8":
        return linear.linear_gated(x, weight)
    return linear.linear(x, weight, linear.GEGLU)


class MoeLayer:
    """A layer's router and experts with random weights, one rank's share of `tp`."""

    def __init__(self, model: ModelShape, tp: int, draw: Callable[..., Tensor], pack: Callable[[Tensor], Matrix]) -> None:
        n, m, self.top_k = model.hidden, model.moe_mlp // tp, model.top_k
        self.norm = torch.ones_like(draw(n))
        self.scale = torch.ones_like(draw(model.experts)).float()
        self.parts = router_parts(draw(model.experts, n).float(), torch.ones_like(self.norm).float())
        self.gate_up, self.down = pack(draw(model.experts, 2 * m, n) * n**-0.5), pack(draw(model.experts, n, m) * m**-0.5)

    def run(self, residual: Tensor, x: Activations, gate_up: Matrix, down: Matrix) -> Tensor:
        """The dense MLP of x, and beside it the experts."""
        dense = on_second_stream(lambda: linear.linear(gated(x, gate_up), down), x)
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
        self.norms = Norms(torch.ones_like(draw(model.hidden)), torch.ones_like(draw(model.hidden)), packs=load == "fp8")
        self.ple = bool(model.ple)
        self.inputs: Callable[[int, int], Tensor] = draw
        self.hidden = model.hidden
        self.experts = [MoeLayer(model, tp, draw, pack) for _ in range(layers if model.experts else 0)]

    def prepare(self, rows: int) -> dict[int, Tensor]:
        """Inputs of so many rows, by width."""
        return {width: self.inputs(rows, width) for width in {self.hidden, *(shape.n for _, shape, _ in self.products)}}

    def run(self, inputs: dict[int, Tensor]) -> Tensor:
        """One step's residual."""
        out: Activations = inputs[self.hidden]
        residual, x = self._norm(inputs[self.hidden], None, self.norms._replace(post=None))
        products, layers = iter(self.products), iter(self.experts)
        for name, shape, weight in products:
            if name in FROM_NORM or name.startswith("qkv"):
                source = x
            else:
                source = out if out.shape[1:] == (shape.n,) else inputs[shape.n]
            norms = self.norms
            if name == "down" and self.ple:
                norms = norms._replace(next_norm=None)
            if shape.gated and self.experts:
                *_, down = next(products)
                out, norms = next(layers).run(residual, source, weight, down), norms._replace(halves=(norms.post, norms.post))
            elif shape.gated:
                out = gated(source, weight)
            elif name == "ple_gate":
                out = linear.linear(source, weight, linear.gelu_times(inputs[shape.m]))
            else:
                out = (linear.linear_parts if self.tp == 1 and name in PARTS else linear.linear)(source, weight)
            if norms.halves or name in (*PARTS, "ple_out"):
                assert isinstance(out, Tensor)
                residual, x = self._norm(out, residual, norms)
        return residual

    @staticmethod
    def _norm(part: Tensor, residual: Tensor | None, norms: Norms) -> tuple[Tensor, Activations]:
        h, x = fused_allreduce_norm(part, residual, norms, EPS)
        return h, h if x is None else x


def _changed(tried: Tile | Changes, in_force: Tile, gated: bool, shared: int, load: Load) -> Tile:
    return fit(replace(in_force, **tried), gated, shared, load) if isinstance(tried, dict) else tried


@contextmanager
def tiles_of(tried: Tiles, most: int = 1 << 20) -> Iterator[None]:
    """Inside the `with` these shapes take these tiles for up to `most` rows, others those in force."""

    def chosen(rows: int, shape: GemmShape, shared: int, *, parts: bool = False, load: Load = "plain") -> Tile | None:
        in_force = choose(rows, shape, shared, parts=parts, load=load)
        key = shape, "gemv" if rows <= 2 else "gemm"
        if key not in tried or rows > most:
            return in_force
        tile = tried[key]
        if isinstance(tile, dict):
            tile = in_force and _changed(tile, in_force, shape.gated, shared, load)
        if tile is None:
            return None
        if tile.kind == "gemv":
            tile = replace(tile, rows=rows)
        return replace(tile, rows=tile.rows or max(16, 1 << (rows - 1).bit_length()), splits=tile.splits if parts else 1)

    def of_experts(assignments: int, count: int, shared: int, load: Load) -> tuple[Tile, ...]:
        in_force = experts_in_force(assignments, count, shared, load)
        if assignments > TOP_K * most:
            return in_force
        pairs = zip(EXPERTS, in_force, strict=True)
        own = (_changed(tried.get((name, tile.kind)) or tile, tile, name == "experts_up", shared, load) for name, tile in pairs)
        return tuple(replace(tile, rows=kept.rows) for tile, kept in zip(own, in_force, strict=True))

    with mock.patch.object(linear, "choose", chosen), mock.patch.object(experts, "choose", of_experts):
        yield


def parse(text: str, products: Sequence[tuple[str, GemmShape]], model: ModelShape) -> Tiles:
    """A `--try`, or several of them with `+` between; `products` of the model by name."""
    if "+" in text:
        return {key: tile for part in text.split("+") for key, tile in parse(part, products, model).items()}
    name, _, form = text.partition(":")
    shapes = {shape for known, shape in products if known == name} or {name}.intersection(EXPERTS if model.experts else ())
    if not shapes:
        raise SystemExit(f"--try {text}: the products are {', '.join(dict.fromkeys(known for known, _ in products))}")
    if form == "cublas":
        return {(shape, kind): None for shape in shapes for kind in ("gemv", "gemm")}
    kind = "gemv" if form.startswith("gemv,") else "gemm"
    options = form.removeprefix("gemv,").split(",")
    sizes = [int(option) for option in options if option.isdecimal()]
    changes: Changes = {option: True for option in options if option.isidentifier()}
    changes |= {field: int(number) for field, _, number in (option.partition("=") for option in options) if number}
    if not sizes:
        return {(shape, kind): changes for shape in shapes}
    bn, bk, depth = sizes
    tile = Tile("gemv", 1, bn, bk, depth) if kind == "gemv" else Tile("gemm", 0, bn, bk, stages=depth)
    return {(shape, kind): replace(tile, **changes) for shape in shapes}


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
    names = [(name, shape) for name, shape, _ in listed.products]
    tried = {"in force": {}} | {text: parse(text, names, model) for text in args.tried}
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
