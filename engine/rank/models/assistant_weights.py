"""The tensors of Gemma 4's assistants. No torch: shapes are asked for without it."""

from engine.geometry import Geometry, Layer
from engine.rank.load.tensor_table import HEAD, Rule, TensorTable
from engine.rank.models.assistant_geometry import AssistantGeometry
from engine.rank.models.gemma4_weights import BLOCK_NORMS

ORDER = "masked_embedding.token_ordering"  # int64 [vocab], ids by centroid: `assistant.OrderedHead` reads it itself

_I, _B = "model.layers.{i}.", "blocks.{i}."
_RULES = (
    Rule("pre_projection.weight", "pre", ("hidden", "pair")),
    Rule("post_projection.weight", "post", ("backbone", "hidden")),
    Rule("model.embed_tokens.weight", "head.table.head", ("vocab", "hidden"), "vocab", "embedding", "dense"),
    Rule("model.embed_tokens.weight", "head.weight", ("vocab", "hidden"), kind="unpacked", present="centroids"),
    Rule("masked_embedding.centroids.weight", "head.centroids", ("centroids", "hidden")),
    Rule(_I + "self_attn.q_proj.weight", _B + "attention.qkv", ("q", "hidden"), "q"),
    Rule(_I + "self_attn.o_proj.weight", _B + "attention.o", ("hidden", "q"), "columns"),
    Rule(_I + "self_attn.q_norm.weight", _B + "attention.q_norm", ("head_dim",), kind="head_norm"),
    Rule(_I + "mlp.gate_proj.weight", _B + "mlp.gate_up", ("width", "hidden"), "gate"),
    Rule(_I + "mlp.up_proj.weight", _B + "mlp.gate_up", ("width", "hidden"), "up"),
    Rule(_I + "mlp.down_proj.weight", _B + "mlp.down", ("hidden", "width"), "columns"),
    *(Rule(f"{_I}{name}.weight", f"{_B}norms.{norm}", ("hidden",), kind="norm") for name, norm in BLOCK_NORMS.items()),
    Rule(_I + "layer_scalar", _B + "scalar", ("one",), kind="scalar"),
    Rule("model.norm.weight", "norm", ("hidden",), kind="norm"),
)


def _sizes(geometry: Geometry, layer: Layer) -> dict[str, int]:
    assert isinstance(geometry, AssistantGeometry), geometry
    return {
        "one": 1,
        "hidden": geometry.hidden,
        "backbone": geometry.backbone,
        "pair": 2 * geometry.backbone,
        "vocab": geometry.vocab,
        "dense": int(not geometry.centroids),
        "centroids": geometry.centroids,
        "head_dim": layer.head_dim,
        "q": geometry.heads * layer.head_dim,
        "width": layer.intermediate,
    }


TENSORS = TensorTable(
    _RULES,
    _sizes,
    published_name=lambda name, _: name,
    is_unused=lambda name, _: name in (HEAD, ORDER),
)
