"""An architecture's checkpoint tensors: parameter, share of a rank, and random values. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from engine.geometry import Geometry, Layer

HEAD = "lm_head.weight"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a clipped product

AxisSizes = Callable[[Any, Layer], dict[str, int]]  # of the architecture's own kind of geometry
Part = Literal["whole", "vocab", "columns", "depth", "q", "k", "v", "gate", "up", "gate_up"]
Kind = Literal["matrix", "embedding", "ple_table", "unpacked", "norm", "head_norm", "scalar", "one"]


@dataclass(frozen=True)
class Rule:
    name: str  # after the model's prefix; {i} is the layer, {e} the expert
    parameter: str
    shape: str  # names of axes
    part: Part = "whole"  # the rank's share and place in a merged parameter (`slices`)
    kind: Kind = "matrix"  # how it is drawn at random (`random_fill`)
    present: str = "one"  # or a size of 0: a layer may lack it
    fused: bool | None = None  # only where a layer's experts are one tensor (True), or one each


def norm_rule(name: str, parameter: str, size: str = "hidden", present: str = "one") -> Rule:
    return Rule(name, parameter, size, kind="norm", present=present)


@dataclass(frozen=True)
class TensorTable:
    rules: tuple[Rule, ...]
    sizes: AxisSizes  # of the axes in a layer, except `one` and fields of the geometry or the layer
    published_name: Callable[[str, Geometry], str]  # of a tensor, from its name in any checkpoint or rule
    is_unused: Callable[[str, Geometry], bool]  # whether the model ignores this published name

    @classmethod
    def of_encoder(cls, rules: tuple[Rule, ...], sizes: AxisSizes, *prefixes: str) -> "TensorTable":
        """`load_encoder` reads bounds itself."""
        begins = tuple(f"model.{prefix}" for prefix in prefixes)
        return cls(
            rules,
            sizes,
            lambda name, _: "model." + name.removeprefix("model."),
            lambda name, _: not name.startswith(begins) or name.endswith(BOUNDS),
        )
