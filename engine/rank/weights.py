"""Fills a rank's shard: from a checkpoint's safetensors, a slice at a time, or with random weights of the same shapes.

`TABLE` says all of it: which checkpoint tensor goes into which parameter, which part of it a rank holds, and how a random one is
drawn. A tensor is copied in blocks of rows straight into its parameter, and converted to the parameter's dtype on the way: no rank
ever holds more than its own shard and one block.
"""

import json
import math
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import Geometry, Layer, kv_groups, shard_kv_heads, shard_vocab
from engine.rank.attention import attention_backend
from engine.rank.batch import Chunk, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4

INDEX = "model.safetensors.index.json"
MIN_RESIDUAL_RMS = 1e-3  # of a forward over random ids: below it weights are missing or zero
_TOWERS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.", "model.vision_embedder.")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_EVEN = {"q": 0, "gate": 0, "up": 0, "columns": 1, "depth": 2}  # parts that are even shares of a dimension
_FLOATS = {"BF16", "F16", "F32"}
_BLOCK_BYTES = 16 << 20  # copied at once
_DRAW = 1 << 24  # values drawn at once
_LISTED = 20  # wrong tensors named in one error

Part = Literal["whole", "vocab", "columns", "depth", "q", "k", "v", "gate", "up", "gate_up"]
Init = Literal["matrix", "embedding", "ple_table", "norm", "head_norm", "scalar", "one"]
Present = Literal["always", "moe", "ple", "kv", "v"]


@dataclass(frozen=True)
class Rule:
    """A checkpoint tensor (its name behind the text prefix; {i} is the layer) and where it goes.

    shape: names of `_sizes`; part: the rank's share of it and its place in a merged parameter, see `_cuts`;
    init: how a random one is drawn, see `_draw`; present: which models and layers have it, see `_present`.
    """

    name: str
    parameter: str
    shape: tuple[str, ...]
    part: Part = "whole"
    init: Init = "matrix"
    present: Present = "always"


def _norm(name: str, parameter: str, size: str = "hidden", present: Present = "always") -> Rule:
    return Rule(name, parameter, (size,), init="norm", present=present)


_I, _B = "layers.{i}.", "blocks.{i}."
TABLE = (
    Rule("embed_tokens.weight", "embedding.tokens.head.weight", ("vocab", "hidden"), "vocab", "embedding"),
    Rule("embed_tokens_per_layer.weight", "embedding.ple_tokens.head.weight", ("ple_vocab", "ples"), "vocab", "ple_table", "ple"),
    Rule("per_layer_model_projection.weight", "embedding.ple_projection.weight", ("ples", "hidden"), present="ple"),
    _norm("per_layer_projection_norm.weight", "embedding.ple_norm", "ple", "ple"),
    Rule(_I + "self_attn.q_proj.weight", _B + "attention.qkv.weight", ("q", "hidden"), "q"),
    Rule(_I + "self_attn.k_proj.weight", _B + "attention.qkv.weight", ("kv", "hidden"), "k", present="kv"),
    Rule(_I + "self_attn.v_proj.weight", _B + "attention.qkv.weight", ("kv", "hidden"), "v", present="v"),
    Rule(_I + "self_attn.o_proj.weight", _B + "attention.o.weight", ("hidden", "q"), "columns"),
    Rule(_I + "self_attn.q_norm.weight", _B + "attention.q_norm", ("head_dim",), init="head_norm"),
    Rule(_I + "self_attn.k_norm.weight", _B + "attention.k_norm", ("head_dim",), init="head_norm", present="kv"),
    Rule(_I + "mlp.gate_proj.weight", _B + "mlp.gate_up.weight", ("width", "hidden"), "gate"),
    Rule(_I + "mlp.up_proj.weight", _B + "mlp.gate_up.weight", ("width", "hidden"), "up"),
    Rule(_I + "mlp.down_proj.weight", _B + "mlp.down.weight", ("hidden", "width"), "columns"),
    Rule(_I + "router.proj.weight", _B + "router.proj.weight", ("experts", "hidden"), present="moe"),
    Rule(_I + "router.scale", _B + "router.scale", ("hidden",), init="one", present="moe"),
    _norm(_I + "router.per_expert_scale", _B + "router.per_expert_scale", "experts", "moe"),
    Rule(_I + "experts.gate_up_proj", _B + "experts.gate_up", ("experts", "expert_pair", "hidden"), "gate_up", present="moe"),
    Rule(_I + "experts.down_proj", _B + "experts.down", ("experts", "hidden", "expert"), "depth", present="moe"),
    _norm(_I + "pre_feedforward_layernorm_2.weight", _B + "norms.pre_experts", present="moe"),
    _norm(_I + "post_feedforward_layernorm_1.weight", _B + "norms.post_dense", present="moe"),
    _norm(_I + "post_feedforward_layernorm_2.weight", _B + "norms.post_experts", present="moe"),
    Rule(_I + "per_layer_input_gate.weight", _B + "ple_gate.weight", ("ple", "hidden"), present="ple"),
    Rule(_I + "per_layer_projection.weight", _B + "ple_out.weight", ("hidden", "ple"), present="ple"),
    _norm(_I + "post_per_layer_input_norm.weight", _B + "norms.post_ple", present="ple"),
    _norm(_I + "input_layernorm.weight", _B + "norms.pre_attention"),
    _norm(_I + "post_attention_layernorm.weight", _B + "norms.post_attention"),
    _norm(_I + "pre_feedforward_layernorm.weight", _B + "norms.pre_mlp"),
    _norm(_I + "post_feedforward_layernorm.weight", _B + "norms.post_mlp"),
    Rule(_I + "layer_scalar", _B + "scalar", ("one",), init="scalar"),
    _norm("norm.weight", "norm"),
)


@dataclass(frozen=True)
class Cut:
    """Indices [start, stop) of a tensor's dimension `dim`, and the index `at` of the parameter where they begin."""

    dim: int
    start: int
    stop: int
    at: int = 0

    def rows(self, shape: tuple[int, ...]) -> range:
        """Rows of the tensor that this cut takes something of."""
        return range(self.start, self.stop) if self.dim == 0 else range(shape[0])

    def index(self, first: int, stop: int) -> tuple[slice, ...]:
        """Index of rows [first, stop), cut."""
        inner = () if self.dim == 0 else (*(slice(None),) * (self.dim - 1), slice(self.start, self.stop))
        return (slice(first, stop), *inner)

    def target(self, parameter: Tensor, first: int, stop: int) -> Tensor:
        """The view of `parameter` that the tensor's rows [first, stop) go to."""
        if self.dim == 0:
            return parameter[self.at + first - self.start : self.at + stop - self.start]
        return parameter[first:stop].narrow(self.dim, self.at, self.stop - self.start)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of a given model and what one rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    cuts: tuple[Cut, ...]
    init: Init

    @property
    def kept(self) -> int:
        """Elements that the rank keeps."""
        return sum(math.prod(self.shape) // self.shape[cut.dim] * (cut.stop - cut.start) for cut in self.cuts)


def pieces(geometry: Geometry, rank: int, size: int) -> dict[str, Piece]:
    """Every tensor that the checkpoint must hold, by its full name, as `rank` of `size` cuts it."""
    found = (
        _piece(rule, geometry, layer, rank, size)
        for rule in TABLE
        for layer in (geometry.layers if "{i}" in rule.name else geometry.layers[:1])
        if _present(rule.present, geometry, layer)
    )
    return {piece.name: piece for piece in found}


def _piece(rule: Rule, geometry: Geometry, layer: Layer, rank: int, size: int) -> Piece:
    sizes = _sizes(geometry, layer)
    name, parameter = (text.format(i=layer.index) for text in (rule.name, rule.parameter))
    shape = tuple(sizes[axis] for axis in rule.shape)
    return Piece(geometry.prefix + name, shape, parameter, _cuts(rule.part, shape, geometry, layer, rank, size), rule.init)


def _present(when: Present, geometry: Geometry, layer: Layer) -> bool:
    return {
        "always": True,
        "moe": geometry.moe is not None,
        "ple": geometry.ple > 0,
        "kv": layer.owns_kv,
        "v": layer.owns_kv and not layer.k_eq_v,
    }[when]


def _sizes(geometry: Geometry, layer: Layer) -> dict[str, int]:
    expert = geometry.moe.intermediate if geometry.moe else 0
    return {
        "one": 1,
        "hidden": geometry.hidden,
        "vocab": geometry.vocab,
        "ple": geometry.ple,
        "ple_vocab": geometry.ple_vocab,
        "ples": geometry.ple * len(geometry.layers),
        "head_dim": layer.head_dim,
        "q": geometry.heads * layer.head_dim,
        "kv": layer.kv_heads * layer.head_dim,
        "width": layer.intermediate,
        "experts": geometry.moe.experts if geometry.moe else 0,
        "expert": expert,
        "expert_pair": 2 * expert,
    }


def _cuts(part: Part, shape: tuple[int, ...], geometry: Geometry, layer: Layer, rank: int, size: int) -> tuple[Cut, ...]:
    """What `rank` keeps: even shares, its KV heads behind its query heads, its up rows behind its gate rows."""
    if part == "whole":
        return (Cut(0, 0, shape[0]),)
    if part == "vocab":
        rows = shard_vocab(shape[0], size, rank)
        return (Cut(0, rows.start, rows.stop),)
    if part in ("k", "v"):
        return (_kv_cut(part, geometry, layer, rank, size),)
    if part == "gate_up":
        half, share = shape[1] // 2, shape[1] // 2 // size
        starts = (rank * share, half + rank * share)
        return tuple(Cut(1, start, start + share, place * share) for place, start in enumerate(starts))
    dim = _EVEN[part]
    share = shape[dim] // size
    return (Cut(dim, rank * share, (rank + 1) * share, share if part == "up" else 0),)


def _kv_cut(part: Part, geometry: Geometry, layer: Layer, rank: int, size: int) -> Cut:
    heads = shard_kv_heads(geometry.heads, layer.kv_heads, size, rank)
    before = geometry.heads // size + (len(heads) if part == "v" else 0)
    return Cut(0, heads.start * layer.head_dim, heads.stop * layer.head_dim, before * layer.head_dim)


# ---- from safetensors


def load(model: Gemma4, folder: Path, geometry: Geometry, rank: int, size: int, progress: bool = False) -> None:
    """Copy this rank's slices of the checkpoint in `folder` into the model's parameters, whose dtype decides.

    progress: show a bar on stderr, or one line at the end where that is no terminal.
    Raises CheckpointError, which names the file, or every tensor that is missing, unexpected, mis-shaped or of no float dtype,
    before anything is copied.
    """
    needed = pieces(geometry, rank, size)
    places = _places(folder, needed, geometry)
    parameters = _parameters(model, needed)
    total = sum(piece.kept * parameters[piece.parameter].element_size() for piece in needed.values())
    with _shown(total, len(needed), progress) as advance:
        for path in sorted(set(places.values())):
            with _opened(path) as file:
                for piece in (needed[name] for name, place in places.items() if place == path):
                    _copy(file.get_slice(piece.name), piece, parameters[piece.parameter], advance)


def _copy(source: Any, piece: Piece, parameter: Tensor, advance: Callable[[int], None]) -> None:
    """Blocks of rows of each cut; `source` is a slice of the file that is read where it is indexed."""
    for cut in piece.cuts if piece.kept else ():
        rows = cut.rows(piece.shape)
        step = max(1, _BLOCK_BYTES * len(piece.cuts) * len(rows) // (4 * piece.kept))
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            target = cut.target(parameter, first, stop)
            target.copy_(source[cut.index(first, stop)])
            advance(target.numel() * target.element_size())


def _parameters(model: Gemma4, needed: dict[str, Piece]) -> dict[str, Tensor]:
    """The model's parameters by name; every element of each is filled by exactly one piece, but for what lies behind a vocabulary's
    end, which is zero."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in needed.values():
        filled[piece.parameter] += piece.kept
        if piece.init in ("embedding", "ple_table"):
            behind = parameters[piece.parameter][piece.kept // piece.shape[1] :]
            filled[piece.parameter] += behind.zero_().numel()
    wrong = [name for name, parameter in parameters.items() if filled[name] != parameter.numel()]
    assert not wrong, f"the table does not fill {wrong}"
    return parameters


def _places(folder: Path, needed: dict[str, Piece], geometry: Geometry) -> dict[str, Path]:
    """The file of every needed tensor, once all of the folder's tensors were found to be right."""
    found, complaints = _found(folder)
    live = {name for name in found if not _unused(name, geometry)}
    complaints += [f"{name} is missing" for name in needed if name not in live]
    complaints += [f"{name} is unexpected" for name in sorted(live - set(needed))]
    complaints += [why for name in needed if name in found and (why := _unlike(needed[name], *found[name][1:]))]
    if complaints:
        more = f"; and {len(complaints) - _LISTED} more" if len(complaints) > _LISTED else ""
        raise CheckpointError(f"{folder}: {'; '.join(complaints[:_LISTED])}{more}")
    return {name: found[name][0] for name in needed}


def _unlike(piece: Piece, shape: tuple[int, ...], dtype: str) -> str | None:
    if shape != piece.shape:
        return f"{piece.name} has shape {list(shape)}, not {list(piece.shape)}"
    if dtype not in _FLOATS:
        return f"{piece.name} has dtype {dtype}, not one of {', '.join(sorted(_FLOATS))}"
    return None


def _unused(name: str, geometry: Geometry) -> bool:
    """Towers, and the K and V weights that checkpoints carry for layers which read another layer's."""
    if name.startswith(_TOWERS):
        return True
    match = re.fullmatch(rf"{re.escape(geometry.prefix)}layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight", name)
    layer = int(match[1]) if match else len(geometry.layers)
    return layer < len(geometry.layers) and not geometry.layers[layer].owns_kv


_Found = dict[str, tuple[Path, tuple[int, ...], str]]


def _found(folder: Path) -> tuple[_Found, list[str]]:
    """Every tensor of the folder's shards (file, shape, dtype), and where index and shards disagree."""
    index = _index(folder)
    shards = sorted({folder / name for name in index.values()}) if index else [_only_shard(folder)]
    found: _Found = {}
    complaints = []
    for path in shards:
        for name, entry in _headers(path):
            found[name] = entry
            if index and index.get(name) != path.name:
                complaints.append(f"{name} lies in {path.name}, where the index does not say so")
    complaints += [f"{name} is not in {shard}, where the index says it is" for name, shard in index.items() if name not in found]
    return found, complaints


def _headers(path: Path) -> Iterator[tuple[str, tuple[Path, tuple[int, ...], str]]]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
            view = file.get_slice(name)
            yield name, (path, tuple(view.get_shape()), view.get_dtype())


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard; empty where the folder has no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors: {error}") from error
    for name, shard in index.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is said to lie in {shard!r}, which is no safetensors file of the folder")
    return dict(index)


def _only_shard(folder: Path) -> Path:
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return shards[0]
    if shards:
        raise CheckpointError(f"{folder} holds {len(shards)} safetensors files, but no {INDEX}")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(f"{folder} holds pickled weights only ({pickles[0]}); only safetensors are read")
    raise CheckpointError(f"{folder} holds no *.safetensors")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, mapped; CheckpointError names it if it is absent, cut short or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@contextmanager
def _shown(total: int, tensors: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """What to call with each number of bytes copied."""
    if progress and sys.stderr.isatty():
        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda size: bar.advance(task, size)
        return
    began = time.monotonic()
    yield lambda _: None
    if progress:
        sys.stderr.write(f"loaded {tensors} tensors, {total / 1e9:.2f} GB a rank, in {time.monotonic() - began:.1f} s\n")


# ---- at random


def dummy(model: Gemma4, geometry: Geometry, seed: int = 0) -> None:
    """Fill the model with random weights: of one and the same full model at every rank and size on one kind of device.

    Each tensor is drawn whole, in blocks, each from its own seed, and a rank keeps its slice: drawing costs less than remembering.
    Values are rounded to the geometry's dtype first, so that an fp32 model holds what the bf16 one does.
    """
    needed = pieces(geometry, model.parallel.rank, model.parallel.size)
    parameters = _parameters(model, needed)
    for piece in needed.values():
        for first, block in _drawn(piece, geometry, seed, model.device):
            _keep(block, first, piece, parameters[piece.parameter])


def dummy_tensor(name: str, geometry: Geometry, seed: int, device: torch.device) -> Tensor:
    """The whole tensor `name` (its checkpoint name) of the model that `dummy` makes, fp32."""
    return torch.cat([block for _, block in _drawn(pieces(geometry, 0, 1)[name], geometry, seed, device)])


def _drawn(piece: Piece, geometry: Geometry, seed: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """(first row, block of rows), fp32. The blocks depend on the whole tensor's shape only."""
    rows = max(1, _DRAW // math.prod(piece.shape[1:]))
    generator = torch.Generator(device)
    for first in range(0, piece.shape[0], rows):
        shape = (min(rows, piece.shape[0] - first), *piece.shape[1:])
        generator.manual_seed(zlib.crc32(f"{piece.name}/{first}".encode()) ^ seed)
        block = _draw(piece, geometry, torch.randn(shape, generator=generator, device=device))
        yield first, block.to(getattr(torch, geometry.dtype)).float()


def _draw(piece: Piece, geometry: Geometry, normal: Tensor) -> Tensor:
    """Live values, of a model that is not chaotic: attention logits of std 1, and a residual that outlives its layer.

    A layer multiplies a relative error by sqrt(c^2 + J^2 (1 - c^2)), c the layer scalar and J ~ 1.6 the gain of a random branch: at
    c = 0.6 sixty layers make it 10^8 times, and bf16 agrees with fp32 in no token, whoever computes it; at 0.95 it is 60 times.
    """
    match piece.init:
        case "matrix":
            return normal / math.sqrt(piece.shape[-1])
        case "embedding":
            return normal / geometry.embedding_scale
        case "ple_table":
            return normal / math.sqrt(geometry.ple)
        case "norm":
            return 1.0 + 0.2 * normal
        case "head_norm":
            return (1.0 + 0.2 * normal) * piece.shape[0] ** -0.25
        case "scalar":
            return torch.full_like(normal, 0.95)
        case "one":
            return torch.ones_like(normal)


def _keep(block: Tensor, first: int, piece: Piece, parameter: Tensor) -> None:
    """Copy what the piece's cuts take of rows [first, first + len(block))."""
    for cut in piece.cuts:
        rows = cut.rows(piece.shape)
        start, stop = max(first, rows.start), min(first + len(block), rows.stop)
        if start < stop:
            cut.target(parameter, start, stop).copy_(block[cut.index(start - first, stop - first)])


# ---- a sign of life


def residual_rms(model: Gemma4) -> float:
    """Root mean square of the residual stream behind the last layer, over a short fixed prompt; every rank must call it.

    CheckpointError below 1e-3, or if it is not a number: such a model answers, but says nothing.
    """
    geometry, size, device = model.geometry, 16, model.device
    ids = (torch.arange(size, device=device) * 7 + 2) % geometry.vocab
    positions = torch.arange(size, device=device)
    groups = [GroupCache(group, 2, 1, size, model.dtype, device) for group in kv_groups(geometry, model.parallel.size)]
    for group in groups:
        group.table[0, 0] = 1
    cache = KVCache(groups)
    batch = eager_batch(cache, model.frequencies, ids, torch.zeros_like(ids), positions, (Chunk(0, 0, size, 0),))
    attention = attention_backend(None, geometry, cache, model.parallel.size, (1,), device)
    rms = model.states(batch, cache, attention)[0].float().pow(2).mean().sqrt().item()
    if not rms >= MIN_RESIDUAL_RMS:
        raise CheckpointError(f"rms of the last residual is {rms:.2e}, below {MIN_RESIDUAL_RMS}: weights missing or zero")
    return rms
