"""The weight products of one rank, from a public shape and a tensor-parallel size."""

from collections import Counter
from dataclasses import dataclass

from kernels.tiles import GemmShape
from tests.nano.model_shapes import ModelShape as Model


@dataclass(frozen=True)
class Product:
    """A product that a step computes `count` times, each with weights of its own."""

    name: str
    shape: GemmShape
    count: int

    @property
    def weight_bytes(self) -> int:
        """bf16."""
        return 2 * self.shape.m * self.shape.n * (2 if self.shape.gated else 1)


def layer_products(model: Model, layer: int, tp: int) -> list[tuple[str, GemmShape]]:
    """The products of a layer, in order; experts and router have kernels of their own."""
    kind = "full" if model.is_full(layer) else "sliding"
    query = model.heads // tp * model.head_dim(layer)
    kv = max(1, model.kv(layer) // tp) * model.head_dim(layer)
    kv_projections = 0 if model.is_shared(layer) else 1 if model.k_eq_v and model.is_full(layer) else 2
    width = model.mlp_width(layer) // tp
    return [
        (f"qkv_{kind}", GemmShape(query + kv_projections * kv, model.hidden)),
        (f"o_{kind}", GemmShape(model.hidden, query)),
        ("gate_up", GemmShape(width, model.hidden, gated=True)),
        ("down", GemmShape(model.hidden, width)),
        *([("ple_gate", GemmShape(model.ple, model.hidden)), ("ple_out", GemmShape(model.hidden, model.ple))] if model.ple else ()),
    ]


def products(model: Model, tp: int) -> list[Product]:
    """All of a decode step, the head last; `count` says how often each comes."""
    found = Counter(product for layer in range(model.layers) for product in layer_products(model, layer, tp))
    found[("head", GemmShape(model.vocab // tp, model.hidden))] = 1
    return [Product(name, shape, count) for (name, shape), count in found.items()]
