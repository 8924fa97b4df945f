"""What an architecture says of its checkpoints' tensors: which goes into which parameter, which part of it a rank holds, how a
random one is drawn. No torch: shapes are asked for without it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from engine.geometry import Geometry, Layer

HEAD = "lm_head.weight"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a clipped product, beside its weight

AxisSizes = Callable[[Any, Layer], dict[str, int]]  # of the architecture's own kind of geometry
Part = Literal["whole", "vocab", "columns", "depth", "q", "k", "v", "gate", "up", "gate_up"]
Kind = Literal["matrix", "embedding", "ple_table", "unpacked", "norm", "head_norm", "scalar", "one"]


@dataclass(frozen=True)
class Rule:
    """A checkpoint tensor (its name behind the model's prefix, which the head's has not; {i} is the layer, {e} the
    expert) and where it goes.

    shape: names of axes, apart by blanks; part: the rank's share of it and its place in a merged parameter, see `slices`; kind: how
    a random one is drawn, see `random_fill`. The parameter of a matrix, which may be packed unless it says otherwise, and of a
    table is a `Weight`. A model or layer where an axis has size 0 is without it: one of its shape, or `present`. fused: it is there
    where the experts of a layer are one tensor (True), or one each (False); None: in both.
    """

    name: str
    parameter: str
    shape: str
    part: Part = "whole"
    kind: Kind = "matrix"
    present: str = "one"
    fused: bool | None = None


def norm_rule(name: str, parameter: str, size: str = "hidden", present: str = "one") -> Rule:
    """Returns the rule of a vector that every rank holds, drawn as norms are."""
    return Rule(name, parameter, size, kind="norm", present=present)


@dataclass(frozen=True)
class TensorTable:
    """The tensors of an architecture's checkpoints.

    sizes           of the axes that rules name, in a layer, but for `one` and fields of the geometry or the layer
    published_name  how published checkpoints call a tensor, given its name in any checkpoint or in a rule
    is_unused       whether the model does without the tensor of this published name
    """

    rules: tuple[Rule, ...]
    sizes: AxisSizes
    published_name: Callable[[str, Geometry], str]
    is_unused: Callable[[str, Geometry], bool]

    @classmethod
    def of_encoder(cls, rules: tuple[Rule, ...], sizes: AxisSizes, *prefixes: str) -> "TensorTable":
        """Makes the table of an encoder, which stands beside the text model under these prefixes; without bounds, which
        `load_encoder` reads itself."""
        begins = tuple(f"model.{prefix}" for prefix in prefixes)
        return cls(
            rules,
            sizes,
            lambda name, _: "model." + name.removeprefix("model."),
            lambda name, _: not name.startswith(begins) or name.endswith(BOUNDS),
        )
