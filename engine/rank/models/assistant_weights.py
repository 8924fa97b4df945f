"""The tensors of Gemma 4's assistants. No torch."""

from engine.geometry import Layer
from engine.rank.load.tensor_table import HEAD, Rule, TensorTable, norm_rule
from engine.rank.models.assistant_geometry import AssistantGeometry
from engine.rank.models.gemma4_weights import block_rules

ORDER = "masked_embedding.token_ordering"  # int64 [vocab], ids by centroid: `assistant.OrderedHead` reads it itself

_RULES = (
    Rule("pre_projection.weight", "pre", "hidden pair"),
    Rule("post_projection.weight", "post", "backbone hidden"),
    Rule("model.embed_tokens.weight", "head.table.head", "vocab hidden", "vocab", "embedding", "dense"),
    Rule("model.embed_tokens.weight", "head.weight", "vocab hidden", kind="unpacked", present="centroids"),
    Rule("masked_embedding.centroids.weight", "head.centroids", "centroids hidden"),
    *block_rules("model.layers.{i}."),
    norm_rule("model.norm.weight", "norm"),
)


def _sizes(geometry: AssistantGeometry, layer: Layer) -> dict[str, int]:
    return {
        "pair": 2 * geometry.backbone,
        "dense": int(not geometry.centroids),
        "q": geometry.heads * layer.head_dim,
    }


TENSORS = TensorTable(
    _RULES,
    _sizes,
    published_name=lambda name, _: name,
    is_unused=lambda name, _: name in (HEAD, ORDER),
)
