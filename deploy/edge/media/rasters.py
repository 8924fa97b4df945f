"""Images as transformers' Gemma 4 processor makes them: RGB, bicubic with antialias, sized to a
budget of soft tokens.

    f = sqrt(budget * 48 * 48 / (height * width))        side = floor(f * side / 48) * 48
"""

import io
import math
import re
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from deploy.edge.media.tasks import BUDGETS, DecodeTask, Prepared, digest_of
from engine.errors import InvalidRequest
from engine.protocol import MediaKind

CELL = 48  # pixels of a soft token's side
MAX_SIDE = 1 << 16
MAX_SCANS = 50  # of a JPEG, each of which goes over all of it; encoders write some ten
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # a tag of EXIF: 2 to 8 where the picture must be turned
_TURNS = dict(enumerate((
    Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE,
    Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90,
), 2))  # fmt: skip
_STRIP_PIXELS = 1 << 20  # resized at once in width: the whole raster is never held twice


def target_size(height: int, width: int, budget: int) -> tuple[int, int]:
    factor = math.sqrt(budget * CELL**2 / (height * width))
    rows = math.floor(factor * height / CELL)
    columns = math.floor(factor * width / CELL)
    if rows == 0:
        rows = 1
        columns = min(width // height, budget)
    elif columns == 0:
        rows = min(height // width, budget)
        columns = 1
    return rows * CELL, columns * CELL


def least_budget(height: int, width: int, most: int) -> int:
    """The least budget up to `most` that shrinks neither side, else `most`."""
    allowed = [budget for budget in BUDGETS if budget <= most]
    for budget in allowed:
        rows, columns = target_size(height, width, budget)
        if rows >= height and columns >= width:
            return budget
    return allowed[-1]


def prepare_image(task: DecodeTask, data: bytes) -> Prepared:
    """The first frame of an image. InvalidRequest."""
    image = upright(opened(data, task.pixels))
    width, height = image.size
    if task.budget is None:
        budget = least_budget(height, width, task.max_soft_tokens)
    else:
        budget = min(task.budget, task.max_soft_tokens)
    raster = resized(image, target_size(height, width, budget))
    return prepared("image", raster, f"<|image>{'<|image|>' * soft_tokens(raster)}<image|>")


def soft_tokens(raster: "np.ndarray[Any, Any]") -> int:
    """Of an image, or of each frame."""
    rows, columns = raster.shape[-3:-1]
    return int(rows * columns) // CELL**2


def prepared(
    kind: MediaKind, raster: "np.ndarray[Any, Any]", text: str, runs: int = 1, clips: tuple[int, ...] = ()
) -> Prepared:
    data = raster.tobytes()
    digest = digest_of(kind, raster.shape, data)
    return Prepared(kind=kind, shape=raster.shape, data=data, digest=digest, text=text, runs=runs, clips=clips)


def opened(data: bytes, pixels: int) -> Image.Image:
    """Reads only the header. InvalidRequest: unknown format, or more than `pixels`."""
    Image.MAX_IMAGE_PIXELS = None  # ours is looked at instead
    if data.startswith(b"\xff\xd8"):
        _check_scans(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(f"it is not one of {', '.join(FORMATS)}, or its header is damaged") from None
    check_pixels(*image.size, pixels)
    return image


def _check_scans(jpeg: bytes) -> None:
    offset = 2
    scans = 0
    while scans <= MAX_SCANS and (marker := _MARKER.search(jpeg, offset)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        offset = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2])
    if scans > MAX_SCANS:
        raise InvalidRequest(f"it has more than {MAX_SCANS} scans")


def check_pixels(width: int, height: int, most: int) -> None:
    """InvalidRequest: too many."""
    if width * height > most or max(width, height) > MAX_SIDE:
        raise InvalidRequest(f"it has {width} x {height} pixels; at most {most}, and {MAX_SIDE} a side, are read")


def upright(image: Image.Image) -> Image.Image:
    image.load()
    turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    if turn is None:
        return image
    return image.transpose(turn)


def resized(image: Image.Image, size: tuple[int, int]) -> "np.ndarray[Any, Any]":
    """uint8 [*size, 3]. Width first, as in torch, so strips give the same result."""
    import torch

    def scaled(tensor: "torch.Tensor", height: int) -> "torch.Tensor":
        return torch.nn.functional.interpolate(tensor, (height, size[1]), mode="bicubic", antialias=True)

    width, height = image.size
    step = max(1, _STRIP_PIXELS // width)
    strips = (_rgb(image.crop((0, top, width, min(top + step, height)))) for top in range(0, height, step))
    narrowed = [scaled(torch.from_numpy(strip).permute(2, 0, 1)[None], strip.shape[0]) for strip in strips]
    return scaled(torch.cat(narrowed, 2), size[0])[0].permute(1, 2, 0).numpy()


def _rgb(image: Image.Image) -> "np.ndarray[Any, Any]":
    """uint8 [height, width, 3]: transparency on white, the upper 8 of 16 bits."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
