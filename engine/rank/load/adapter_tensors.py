"""Maps every tensor of a PEFT folder, or refuses the adapter with a list. No torch at import.

base_model.model.model.language_model.layers.3.self_attn.k_proj.lora_A.weight     with `language_model.` or without
base_model.model.model.layers.3.mlp.experts.base_layer.lora_B.weight              all experts of a layer:

A [experts * r, n]   expert e has rows [e r, (e + 1) r)
B [m, r * experts]   expert e has columns e, e + experts, ...; gate rows before up rows
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.adapters import AdapterConfig, read_adapter
from engine.errors import CheckpointError
from engine.geometry import Geometry
from engine.quantisation import Quantisation
from engine.rank.load.slices import Piece, pieces
from engine.rank.load.tensor_files import opened, zero_tensors
from engine.rank.load.tensor_table import TensorTable

MAX_TENSORS = 1 << 16  # of an adapter: 23 040 are those of each expert of the 26B
_LISTED = 20  # wrong tensors named in one error
_DTYPES = ("F32", "BF16", "F16")
_ONE_EACH = Quantisation(fused=False)  # by these names, those of each expert, matrices are told apart
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_ALL_EXPERTS = re.compile(r"(.+\.experts)(?:\.base_layer)?")
_UNREAD = re.compile(r"layers\.\d+\.self_attn\.[kv]_proj")  # of a layer that reads another's K and V


class AdapterMatrix(NamedTuple):
    """B A of one matrix, or of all `experts` of a layer. a, b: names of tensors; rank: of one matrix."""

    module: str  # as the checkpoint's tensors name it
    bases: tuple[str, ...]  # published names of the matrices of B's rows, in order
    a: str
    b: str
    rank: int
    scale: float
    experts: int = 0

    def name_of(self, base: str, expert: int) -> str:
        if not self.experts:
            return base
        return base.replace(".experts.", f".experts.{expert}.")

    @property
    def names(self) -> Iterator[str]:
        return (self.name_of(base, expert) for base in self.bases for expert in range(max(1, self.experts)))


@dataclass(frozen=True)
class AdapterTensors:
    config: AdapterConfig
    matrices: tuple[AdapterMatrix, ...]


class _Tensors(NamedTuple):
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


def adapter_pieces(tensors: TensorTable, geometry: Geometry, rank: int = 0, size: int = 1) -> dict[str, Piece]:
    """The model's matrices by the names that adapters use, as `rank` of `size` cuts them."""
    every = pieces(tensors, geometry, rank, size, _ONE_EACH)
    return {name: piece for name, piece in every.items() if piece.kind in ("matrix", "unpacked")}


def map_adapters(folders: Mapping[str, str], tensors: TensorTable, geometry: Geometry) -> list[AdapterTensors]:
    return [map_adapter(read_adapter(name, Path(folder)), tensors, geometry) for name, folder in folders.items()]


def map_adapter(config: AdapterConfig, tensors: TensorTable, geometry: Geometry) -> AdapterTensors:
    """Reads headers, and whether B of an encoder's module is 0. CheckpointError lists tensors without
    a place, without their other half, or of a wrong shape."""
    found = _headers(config)
    known = adapter_pieces(tensors, geometry)
    complaints: list[str] = []
    matrices: dict[str, AdapterMatrix] = {}
    modules = list(dict.fromkeys(_modules(found, complaints)))
    idle = _idle(config, modules, found, tensors, geometry)
    for module in modules:
        absent = [name for name in _tensor_names(module) if name not in found.shapes]
        if absent:
            complaints += [f"{name:.200} is missing" for name in absent]
        elif not (module in idle or _is_unread(module, tensors, geometry)):
            _add(_mapped(config, module, found, known, tensors, geometry), module, matrices, complaints)
    if complaints:
        listed = "; ".join(complaints[:_LISTED])
        raise CheckpointError(f"adapters.{config.name}: {config.file}: wrong tensors ({len(complaints)}): {listed}")
    return AdapterTensors(config, tuple(matrices.values()))


def _headers(config: AdapterConfig) -> _Tensors:
    found = _Tensors({}, {})
    with opened(config.file, "np") as file:
        names = list(file.keys())
        if len(names) > MAX_TENSORS:
            raise CheckpointError(f"adapters.{config.name}: {config.file} has {len(names)} tensors; at most {MAX_TENSORS} are read")
        for name in names:
            view = file.get_slice(name)
            found.shapes[name] = tuple(view.get_shape())
            found.dtypes[name] = view.get_dtype()
    return found


def _modules(found: _Tensors, complaints: list[str]) -> Iterator[str]:
    for name in sorted(found.shapes):
        match = _KEY.fullmatch(name)
        if match is None:
            complaints.append(f"{name:.200} is no lora_A or lora_B of a matrix")
        elif found.dtypes[name] not in _DTYPES:
            complaints.append(f"{name:.200} has dtype {found.dtypes[name]}, not one of {', '.join(_DTYPES)}")
        elif len(found.shapes[name]) != 2:
            complaints.append(f"{name:.200} has shape {list(found.shapes[name])}, not two dimensions")
        else:
            yield match[1]


def _tensor_names(module: str) -> tuple[str, str]:
    """The tensors of a module's A and B."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _idle(
    config: AdapterConfig, modules: Sequence[str], found: _Tensors, tensors: TensorTable, geometry: Geometry
) -> set[str]:
    """Modules that the text model ignores and whose B is 0: training with text alone leaves those of
    encoders so."""
    unused = {
        _tensor_names(module)[1]: module
        for module in modules
        if tensors.is_unused(tensors.published_name(f"{module}.weight", geometry), geometry)
    }
    present = unused.keys() & found.shapes.keys()
    return {unused[name] for name in zero_tensors(config.file, present)} if present else set()


def _is_unread(module: str, tensors: TensorTable, geometry: Geometry) -> bool:
    name = tensors.published_name(f"{module}.weight", geometry)
    inner = name.removeprefix(geometry.prefix).removesuffix(".weight")
    return _UNREAD.fullmatch(inner) is not None and tensors.is_unused(name, geometry)


def _add(made: AdapterMatrix | str, module: str, matrices: dict[str, AdapterMatrix], complaints: list[str]) -> None:
    if isinstance(made, str):
        complaints.append(made)
        return
    for base in made.bases:
        if base in matrices:
            complaints.append(f"{module} and {matrices[base].module} are for one matrix")
            return
        matrices[base] = made


def _mapped(
    config: AdapterConfig, module: str, found: _Tensors, known: dict[str, Piece], tensors: TensorTable, geometry: Geometry
) -> AdapterMatrix | str:
    a, b = _tensor_names(module)
    base = tensors.published_name(f"{module}.weight", geometry)
    experts = _ALL_EXPERTS.fullmatch(base.removesuffix(".weight"))
    if base in known:
        made = AdapterMatrix(module, (base,), a, b, config.rank(module), config.scale(module))
        return _checked(made, known[base].shape, found)
    if experts is None or geometry.moe is None:
        return f"{module:.200} is no matrix of the model that adapters may change"
    return _of_all_experts(config, module, experts[1], found, known, geometry.moe.experts)


def _of_all_experts(
    config: AdapterConfig, module: str, layer: str, found: _Tensors, known: dict[str, Piece], count: int
) -> AdapterMatrix | str:
    """Gate and up, or down: told apart by shape, as PEFT's names only say which was wrapped last."""
    a, b = _tensor_names(module)
    gate = f"{layer}.gate_proj.weight"
    down = f"{layer}.down_proj.weight"
    first = known.get(f"{layer}.0.gate_proj.weight")
    last = known.get(f"{layer}.0.down_proj.weight")
    if first is None or last is None:
        return f"{module:.200} is no matrix of the model that adapters may change"
    width, hidden = first.shape
    wrapped = module.removesuffix(".base_layer")
    if found.shapes[b][0] == 2 * width and found.shapes[a][1] == hidden:
        key = f"{wrapped}.gate_up_proj"
        bases = (gate, f"{layer}.up_proj.weight")
        return _checked(AdapterMatrix(module, bases, a, b, config.rank(key), config.scale(key), count), (2 * width, hidden), found)
    key = f"{wrapped}.down_proj"
    return _checked(AdapterMatrix(module, (down,), a, b, config.rank(key), config.scale(key), count), last.shape, found)


def _checked(made: AdapterMatrix, shape: Sequence[int], found: _Tensors) -> AdapterMatrix | str:
    inner = made.rank * max(1, made.experts)
    wanted = {made.a: (inner, shape[1]), made.b: (shape[0], inner)}
    for name, right in wanted.items():
        if found.shapes[name] != right:
            return f"{name:.200} has shape {list(found.shapes[name])}, not {list(right)}"
    return made
