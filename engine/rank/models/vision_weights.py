"""The tensors of vision towers, and of the 12B's embedder. No torch: shapes are asked for without it."""

from engine.geometry import Layer
from engine.rank.load.tensor_table import Rule, TensorTable
from engine.rank.models.gemma4_weights import BLOCK_NORMS
from engine.vision_geometry import PATCH, SIDE, VisionGeometry

_T, _L, _B = "vision_tower.", "vision_tower.encoder.layers.{i}.", "blocks.{i}."
_E = "vision_embedder."
_RULES = (
    Rule(_T + "patch_embedder.input_proj.weight", "patches", ("tower", "patch")),
    Rule(_T + "patch_embedder.position_embedding_table", "positions", ("axes", "positions", "tower"), kind="unpacked"),
    *(Rule(f"{_L}self_attn.{name}_proj.linear.weight", f"{_B}{name}.weight", ("heads", "hidden")) for name in "qkv"),
    Rule(_L + "self_attn.o_proj.linear.weight", _B + "o.weight", ("hidden", "heads")),
    *(Rule(f"{_L}self_attn.{name}_norm.weight", f"{_B}{name}_norm", ("head_dim",), kind="head_norm") for name in "qk"),
    *(Rule(f"{_L}mlp.{name}_proj.linear.weight", f"{_B}{name}.weight", ("width", "hidden")) for name in ("gate", "up")),
    Rule(_L + "mlp.down_proj.linear.weight", _B + "down.weight", ("hidden", "width")),
    *(Rule(f"{_L}{name}.weight", f"{_B}norms.{own}", ("tower",), kind="norm") for name, own in BLOCK_NORMS.items()),
    Rule(_T + "std_bias", "std_bias", ("standardized",), kind="norm"),
    Rule(_T + "std_scale", "std_scale", ("standardized",), kind="norm"),
    Rule(_E + "patch_dense.weight", "dense.weight", ("embedder", "cell"), kind="unpacked"),
    Rule(_E + "patch_dense.bias", "dense.bias", ("embedder",), kind="norm"),
    Rule(_E + "pos_embedding", "positions", ("positions", "axes", "embedder"), kind="unpacked"),
    *(
        Rule(f"{_E}{norm}.{name}", f"{own}.{name}", (size,), kind="norm")
        for norm, own, size in (
            ("patch_ln1", "patch_norm", "cell"), ("patch_ln2", "dense_norm", "embedder"), ("pos_norm", "position_norm", "embedder")
        )
        for name in ("weight", "bias")
    ),
    Rule("embed_vision.embedding_projection.weight", "out", ("model", "hidden")),
)


def _sizes(geometry: VisionGeometry, layer: Layer) -> dict[str, int]:
    tower, embedder = (0, geometry.hidden) if geometry.unified else (geometry.hidden, 0)
    return {
        "axes": 2,
        "hidden": geometry.hidden,
        "tower": tower,
        "embedder": embedder,
        "model": geometry.model,
        "positions": geometry.positions,
        "patch": 3 * PATCH**2,
        "cell": 3 * SIDE**2 if embedder else 0,
        "head_dim": layer.head_dim,
        "heads": geometry.heads * layer.head_dim,
        "width": layer.intermediate,
        "standardized": geometry.hidden if geometry.standardize else 0,
    }


TENSORS = TensorTable.of_encoder(_RULES, _sizes, "vision_", "embed_vision.")
