"""Reads and checks the headers of a checkpoint's safetensors."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from engine.checkpoint import INDEX, read_index
from engine.errors import CheckpointError
from engine.geometry import Geometry
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.slices import Piece
from engine.rank.load.tensor_table import TensorTable

_OTHERS = {"pickled": ("*.bin", "*.pt", "*.pth", "*.ckpt"), "GGUF": ("*.gguf",)}
_PIECE_BYTES = 1 << 20
_LISTED = 20  # wrong tensors named in one error


class TensorHeader(NamedTuple):
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


Headers = dict[str, TensorHeader]  # by published name


def checked_headers(
    folder: Path, needed: dict[str, Piece], tensors: TensorTable, geometry: Geometry, weights: Quantisation = UNQUANTISED
) -> Headers:
    """CheckpointError lists tensors that are missing, unexpected, mis-shaped or of a wrong dtype."""
    by_name, complaints = headers(folder, tensors, geometry)
    unread = {name for piece in needed.values() for name in piece.unread}
    live = {
        name
        for name in by_name
        if name in needed or not (name in unread or tensors.is_unused(name, geometry) or weights.is_unused(name))
    }
    complaints += [f"{name} is missing" for name in needed if name not in live]
    complaints += [f"{by_name[name].name} is unexpected" for name in sorted(live - set(needed))]
    complaints += [why for name in needed if name in by_name and (why := _mismatch(needed[name], by_name[name]))]
    if complaints:
        if live:
            advice = ""
        else:
            advice = "; of an encoder that is not there: `language_model_only: true` serves the text without it"
        raise CheckpointError(f"{folder}: wrong tensors ({len(complaints)}): {'; '.join(complaints[:_LISTED])}{advice}")
    return {name: by_name[name] for name in needed}


def _mismatch(piece: Piece, header: TensorHeader) -> str | None:
    if not _is_shape(header.shape, piece):
        return f"{header.name} has shape {list(header.shape)}, not {list(piece.shape)}"
    if header.dtype not in piece.tensor.saved:
        return f"{header.name} has dtype {header.dtype}, not one of {', '.join(piece.tensor.saved)}"
    return None


def _is_shape(shape: tuple[int, ...], piece: Piece) -> bool:
    """Scales may have more or fewer dimensions of size 1."""
    if piece.tensor.suffix == "":
        return shape == piece.shape
    return [size for size in shape if size != 1] == [size for size in piece.shape if size != 1]


def headers(folder: Path, tensors: TensorTable, geometry: Geometry) -> tuple[Headers, list[str]]:
    """Headers by published name, and complaints where index and shards disagree."""
    index = read_index(folder)
    by_name: Headers = {}
    complaints = []
    names = set()
    for path in sorted({folder / name for name in set(index.values())}) if index else [_only_shard(folder)]:
        shard = path.name
        with opened(path, "np") as file:  # nothing is read, and torch is not needed
            for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                view = file.get_slice(name)
                header = TensorHeader(path, name, tuple(view.get_shape()), view.get_dtype())
                names.add(name)
                if index and index.get(name) != shard:
                    complaints.append(f"{name} lies in {shard}, where the index does not say so")
                first = by_name.setdefault(tensors.published_name(_usual(name), geometry), header)
                if first.name != name:
                    complaints.append(f"{first.name} and {name} are names of one tensor")
    complaints += [f"{name} is not in {shard}, where the index says it is" for name, shard in index.items() if name not in names]
    return by_name, complaints


def _usual(name: str) -> str:
    return name.replace(".moe.experts.", ".experts.").removesuffix("_inv")


def _only_shard(folder: Path) -> Path:
    shards = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return shards[0]
    if shards:
        raise CheckpointError(f"{folder} holds {len(shards)} safetensors files, but no {INDEX}")
    for kind, patterns in _OTHERS.items():
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        if found:
            raise CheckpointError(f"{folder} holds {kind} weights only ({found[0]}); only safetensors are read")
    raise CheckpointError(f"{folder} holds no *.safetensors")


def by_file(by_name: Headers) -> Iterator[tuple[str, TensorHeader, Any]]:
    for path in sorted({header.path for header in by_name.values()}):
        with opened(path) as file:
            yield from ((name, header, file) for name, header in by_name.items() if header.path == path)


def zero_tensors(path: Path, names: Collection[str]) -> set[str]:
    """Those of a safetensors file's tensors, in any dtype, whose bytes are all 0. `opened` has checked the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        zero = set()
        for name in names:
            begin, end = header[name]["data_offsets"]
            file.seek(8 + size + begin)
            pieces = (file.read(min(_PIECE_BYTES, end - at)) for at in range(begin, end, _PIECE_BYTES))
            if not any(piece.strip(b"\0") for piece in pieces):
                zero.add(name)
    return zero


@contextmanager
def opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """CheckpointError: absent, cut short or no safetensors file."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
