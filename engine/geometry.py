"""The shape of a Gemma 4 text model, read from config.json and expanded to layers. No torch.

Source: transformers' `models/gemma4`. Reads the public layout (`global_head_dim`, `num_global_key_value_heads`) and transformers'
(`per_layer_config`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from engine.checkpoint import read_json
from engine.errors import CheckpointError
from engine.protocol import JsonObject
from engine.quantisation import read_quantisation

T = TypeVar("T")
Implemented = dict[str, tuple[Any, ...]]  # by key, the values that it may have
LayerKind = Literal["sliding", "full"]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
DType = Literal["float32", "bfloat16"]
PageDType = Literal[DType, "float8_e4m3fn"]
PAGE_SIZE: Final = 32
ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}  # bytes
MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
# Keys that change the mathematics, of Gemma 4 or of its ancestors, and the values that are implemented.
IMPLEMENTED: Final[Implemented] = {
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "hidden_act": ("gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "query_pre_attn_scalar": (1, None),
    "rope_scaling": (None,),
    "use_bidirectional_attention": ("vision", None),
}
# What transformers takes for a key that config.json leaves out.
_HEAD_DIM = 256
_GLOBAL_HEAD_DIM = 512
_ROPES: JsonObject = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_PER_LAYER = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True)
class Rope:
    """The first `pairs` of the pairs (i, i + head_dim/2) rotate. inv_freq[i] = theta ** (-2 i / head_dim) / factor."""

    theta: float
    pairs: int
    factor: float = 1.0


@dataclass(frozen=True)
class Moe:
    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True)
class Layer:
    index: int
    kind: LayerKind
    head_dim: Positive
    kv_heads: Positive
    rope: Rope
    intermediate: Positive
    kv_source: int  # the layer whose K and V it reads, itself or a producer
    k_eq_v: bool = False
    drafts: bool = False  # a drafter's, which reads the target's layer

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index and not self.drafts


@dataclass(frozen=True)
class Geometry:
    """Sizes are of the whole model; `window` includes the query's own key."""

    hidden: Positive
    vocab: Positive
    heads: Positive
    window: Positive
    eps: float
    softcap: float | None
    max_position: int
    layers: tuple[Layer, ...]
    ple: int
    ple_vocab: int
    moe: Moe | None
    pad: int
    placeholders: tuple[int, ...]
    dtype: str
    prefix: str  # of published tensor names
    tied: bool  # logits use the embedding's table
    bidirectional: bool  # tokens of an image see each other in sliding layers

    @property
    def residual_is_read(self) -> bool:
        """Whether routers or per-layer embeddings read the residual, not only fused norms."""
        return self.moe is not None or self.ple > 0

    @property
    def summed_width(self) -> int:
        return self.hidden * (2 if self.moe else 1)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden)


@dataclass(frozen=True)
class KVGroup:
    """Layers of one kind, with one pool, page table and allocator.

    Pool of one layer and rank: `[pages, 2, kv_heads, page, head_dim]`, K at [:, 0], V at [:, 1]. `layers` own K and V, in the
    pool's order. `window` None: full attention.
    """

    index: int
    name: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None
    page: int = PAGE_SIZE
    dtype: PageDType = "bfloat16"
    bidirectional: bool = False

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * 2 * self.kv_heads * self.page * self.head_dim * ITEMSIZE[self.dtype]

    def pages_for(self, start: int, end: int) -> range:
        """Table indices of pages held while positions [start, end) run, window included."""
        return range(0 if self.window is None else max(0, start - self.window + 1) // self.page, -(-end // self.page))

    def worst_pages(self, tokens: int) -> int:
        """Most pages of a sequence that runs a token at a time."""
        whole = -(-tokens // self.page)
        if self.window is None:
            return whole
        return min(whole, (self.window - 2) // self.page + 2)

    def span_pages(self, length: int) -> int:
        """Pages that a chunk of `length` positions needs with its window, wherever it begins."""
        if self.window is None:
            window = 0
        else:
            window = -(-(self.window - 1) // self.page)
        return (length - 2) // self.page + 2 + window


def shard_kv_heads(heads: int, kv_heads: int, tp: int, rank: int) -> range:
    """KV heads of `rank`: an equal share or, if they do not divide, the replicated one of its query
    heads."""
    if kv_heads % tp == 0:
        share = kv_heads // tp
        return range(rank * share, (rank + 1) * share)
    first = rank * (heads // tp) // (heads // kv_heads)
    return range(first, first + 1)


def vocab_share(rows: int, tp: int) -> int:
    """Vocabulary rows for each rank: an even share, else rounded up to cache lines of logits."""
    if rows % tp == 0:
        return rows // tp
    return 32 * -(-rows // (32 * tp))


def shard_vocab(rows: int, tp: int, rank: int) -> range:
    share = vocab_share(rows, tp)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def check_tp(geometry: Geometry, tp: int) -> None:
    """CheckpointError names a size that `tp` does not divide. KV heads may replicate; a vocabulary
    is padded."""
    sizes = {"attention heads": geometry.heads}
    sizes |= {f"intermediate size of layer {layer.index}": layer.intermediate for layer in geometry.layers}
    if geometry.moe is not None:
        sizes["expert intermediate size"] = geometry.moe.intermediate
    for name, size in sizes.items():
        if size % tp:
            raise CheckpointError(f"{name} ({size}) does not divide by tensor-parallel size {tp}")
    for kv in {layer.kv_heads for layer in geometry.layers}:
        if kv % tp and tp % kv:
            raise CheckpointError(f"{kv} KV heads neither divide by tensor-parallel size {tp} nor divide it")


def kv_groups(geometry: Geometry, tp: int, page: int = PAGE_SIZE, dtype: PageDType = "bfloat16") -> tuple[KVGroup, ...]:
    """Sliding, if there is one, then full."""
    check_tp(geometry, tp)
    groups: list[KVGroup] = []
    for kind in ("sliding", "full"):
        owners = [layer for layer in geometry.layers if layer.kind == kind and layer.owns_kv]
        if not owners:
            continue
        first = owners[0]
        indices = tuple(layer.index for layer in owners)
        heads = len(shard_kv_heads(geometry.heads, first.kv_heads, tp, 0))
        window, both_ways = (geometry.window, geometry.bidirectional) if kind == "sliding" else (None, False)
        groups.append(KVGroup(len(groups), kind, indices, heads, first.head_dim, window, page, dtype, both_ways))
    return tuple(groups)


def read_geometry(folder: Path) -> Geometry:
    """CheckpointError names the wrong file or key, or an unsupported quantisation."""
    path = folder / "config.json"
    with naming(str(path)):
        read_quantisation(folder)  # refuses a quantisation that no format reads
    return parse_config(read_json(path), str(path))


def read_section(folder: Path, name: str, implemented: Implemented, make: Callable[[JsonObject, Geometry], T]) -> T | None:
    """None without the section. CheckpointError names the key."""
    path = folder / "config.json"
    section = read_json(path).get(name)
    if not section:
        return None
    with naming(f"{path}: {name}"):
        _check_implemented(section, implemented)
        made = make(section, read_geometry(folder))
        msgspec.convert(msgspec.to_builtins(made) | {"layers": ()}, type(made))  # every number is one
        return made


def parse_config(config: JsonObject, source: str = "config.json") -> Geometry:
    text = config.get("text_config", config)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"{source}: model_type {model_type!r} is not a Gemma 4 text model")
    with naming(source):
        _check_implemented(text, IMPLEMENTED)
        geometry = _geometry(config, text)
        msgspec.convert(msgspec.to_builtins(geometry), Geometry)  # every number is one
        return geometry


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Config errors become a CheckpointError that names source and key."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{source}: the key {error.args[0]!r} is missing") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from error


def _check_implemented(section: JsonObject, implemented: Implemented) -> None:
    """ValueError names every key whose value is not implemented."""
    if wrong := [
        f"{key} {section[key]!r} is not implemented, only {' or '.join(map(repr, values))}"
        for key, values in implemented.items()
        if key in section and section[key] not in values
    ]:
        raise ValueError("; ".join(wrong))


def _geometry(config: JsonObject, text: JsonObject) -> Geometry:
    vocab = text["vocab_size"]
    ple = text.get("hidden_size_per_layer_input") or 0
    ple_vocab = text.get("vocab_size_per_layer_input") or vocab
    if ple and ple_vocab < vocab:
        raise ValueError(f"vocab_size_per_layer_input ({ple_vocab}) is below vocab_size ({vocab})")
    return Geometry(
        hidden=text["hidden_size"],
        vocab=vocab,
        heads=text["num_attention_heads"],
        window=text["sliding_window"],
        eps=text["rms_norm_eps"],
        softcap=text.get("final_logit_softcapping"),
        max_position=text["max_position_embeddings"],
        layers=_layers(text),
        ple=ple,
        ple_vocab=ple_vocab,
        moe=Moe(text["num_experts"], text["top_k_experts"], text["moe_intermediate_size"])
        if text.get("enable_moe_block")
        else None,
        pad=text.get("pad_token_id") or 0,
        placeholders=_placeholders(config),
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16",
        prefix="model.language_model." if "text_config" in config else "model.",
        tied=config.get("tie_word_embeddings", True),
        bidirectional=text.get("use_bidirectional_attention", "vision" if "unified" in config["model_type"] else None) == "vision",
    )


def _layers(text: JsonObject) -> tuple[Layer, ...]:
    count = text["num_hidden_layers"]
    kinds = _kinds(text["layer_types"], count)
    shared_from = count - (text.get("num_kv_shared_layers") or 0)
    overrides = _overrides(text, count)
    ropes = text.get("rope_parameters") or _ROPES
    producers = {kinds[index]: index for index in range(shared_from)}
    layers = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = _heads(text, kind, overrides.get(index, {}))
        shared = index >= shared_from
        if shared and kind not in producers:
            raise ValueError(f"layer {index} shares KV, but no {kind} layer before {shared_from} produces it")
        layers.append(
            Layer(
                index,
                kind,
                head_dim,
                kv_heads,
                rope=_rope(ropes[f"{kind}_attention"], head_dim),
                intermediate=text["intermediate_size"] * (2 if shared and text.get("use_double_wide_mlp") else 1),
                k_eq_v=kind == "full" and bool(text.get("attention_k_eq_v")),
                kv_source=producers[kind] if shared else index,
            )
        )
    for kind in set(kinds):
        if len(shapes := {(layer.head_dim, layer.kv_heads) for layer in layers if layer.kind == kind}) > 1:
            raise ValueError(f"per_layer_config: {kind} layers differ in (head_dim, num_key_value_heads): {sorted(shapes)}")
    return tuple(layers)


def _overrides(text: JsonObject, count: int) -> dict[int, JsonObject]:
    """`per_layer_config` by layer. ValueError: not implemented, or no such layer."""
    overrides = {int(index): value for index, value in (text.get("per_layer_config") or {}).items()}
    for index, values in overrides.items():
        other = [key for key, value in values.items() if key not in _PER_LAYER and (key not in text or value != text[key])]
        if index not in range(count) or other:
            raise ValueError(f"per_layer_config: {other[0] if other else 'any key'} of layer {index} is not implemented")
    return overrides


def _kinds(names: list[str], count: int) -> list[LayerKind]:
    if len(names) != count:
        raise ValueError(f"layer_types has {len(names)} entries for {count} layers")
    table: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}
    if unknown := set(names) - set(table):
        raise ValueError(f"unknown layer type {min(unknown)!r}")
    return [table[name] for name in names[:-1]] + ["full"]


def _heads(text: JsonObject, kind: LayerKind, override: JsonObject) -> tuple[int, int]:
    """The global KV-head count applies only with attention_k_eq_v."""
    head_dim: int = text.get("head_dim", _HEAD_DIM)
    kv_heads: int = text["num_key_value_heads"]
    if kind == "full":
        head_dim = text.get("global_head_dim", _GLOBAL_HEAD_DIM) or head_dim
        if text.get("attention_k_eq_v"):
            kv_heads = text.get("num_global_key_value_heads") or kv_heads
    return override.get("head_dim", head_dim), override.get("num_key_value_heads", kv_heads)


def _rope(parameters: JsonObject, head_dim: int) -> Rope:
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise ValueError(f"rope_type {kind!r} is not one of default, proportional")
    if kind == "proportional":
        fraction = parameters.get("partial_rotary_factor", 1.0)
    else:
        fraction = 1.0
    factor = float(parameters.get("factor") or 1.0)
    if kind == "default" and factor != 1.0:
        raise ValueError(f"rope_parameters: factor {factor:g} is not implemented with rope_type 'default'")
    return Rope(float(parameters["rope_theta"]), int(fraction * head_dim // 2), factor)


def _placeholders(config: JsonObject) -> tuple[int, ...]:
    return tuple(sorted(filter(None, {config.get(f"{kind}_token_id") for kind in ("image", "video", "audio")})))
