"""The shape of a vision tower, or of the 12B's embedder without layers, from `vision_config`. No
torch.

A picture is cut into patches of PATCH x PATCH pixels; a cell of CELL x CELL patches gives one soft
token.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import CheckpointError, InvalidRequest
from engine.geometry import Geometry, Implemented, Layer, Rope, read_section
from engine.protocol import JsonObject, MediaItem

PATCH: Final = 16
CELL: Final = 3
SIDE: Final = PATCH * CELL  # pixels of a cell's side
_IMPLEMENTED: Final[Implemented] = {
    "patch_size": (PATCH,),
    "pooling_kernel_size": (CELL,),
    "attention_bias": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh",),
}


LARGEST_PICTURE = 1120  # soft tokens that a picture may have


@dataclass(frozen=True)
class VisionGeometry(Geometry):
    """Fields that an encoder does not use are its model's. positions: table entries of an axis"""

    model: int  # hidden size of the model that reads its rows
    positions: int
    unified: bool  # it is the 12B's embedder
    standardize: bool  # its rows are shifted and scaled

    @property
    def output(self) -> int:
        return self.hidden

    @property
    def longest(self) -> int:
        return self.positions // (1 if self.unified else CELL)

    def check(self, item: MediaItem) -> None:
        """InvalidRequest unless the item has data for each of its positions."""
        shape = item.shape
        if len(shape) < 3 or shape[-3] % SIDE or shape[-2] % SIDE or shape[-1] != 3:
            raise InvalidRequest(f"{item.kind} of shape {shape}: its sides are no multiples of {SIDE}, or it has no three colours")
        *frames, height, width, _ = shape
        cells = math.prod(frames) * (height // SIDE) * (width // SIDE)
        if max(height, width) > SIDE * self.longest or cells != item.soft_tokens:
            raise InvalidRequest(f"{item.kind} of shape {item.shape} does not fit its positions, or is longer than {self.longest}")


def read_vision(folder: Path) -> VisionGeometry | None:
    return read_section(folder, "vision_config", _IMPLEMENTED, _geometry)


def _geometry(vision: JsonObject, text: Geometry) -> VisionGeometry:
    if unified := "mm_embed_dim" in vision:
        hidden = vision["mm_embed_dim"]
        positions = vision["mm_posemb_size"]
        heads = 1
        count, head_dim, width = 1, 0, 0  # a layer of width 0, whose tensors no rule names
    else:
        hidden = vision["hidden_size"]
        positions = vision["position_embedding_size"]
        heads = vision["num_attention_heads"]
        count = vision["num_hidden_layers"]
        head_dim = vision["head_dim"]
        width = vision["intermediate_size"]
        if head_dim % 4 or vision["num_key_value_heads"] != heads:
            raise CheckpointError(f"vision_config: head_dim {head_dim}, or fewer KV heads than query heads, is not implemented")
    rope = Rope(float((vision.get("rope_parameters") or {}).get("rope_theta", 100.0)), head_dim // 4)
    layers = tuple(Layer(i, "full", head_dim, heads, rope, width, kv_source=i) for i in range(count))
    own = {"hidden": hidden, "heads": heads, "layers": layers, "eps": vision["rms_norm_eps"], "ple": 0, "moe": None}
    return VisionGeometry(
        **(vars(text) | own),
        model=text.hidden,
        positions=positions,
        unified=unified,
        standardize=vision.get("standardize", False),
    )
