"""Images as transformers' Gemma 4 processor makes them: sizes, counts, values, positions of a prompt's ids."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from deploy.edge.media import rasters
from deploy.edge.media.tasks import BUDGETS, DecodeTask, Prepared
from engine.errors import InvalidRequest
from tests.support.media_files import saved

pytestmark = pytest.mark.cpu

# all budgets at shapes that cut, stretch and thin; other sizes at one
SIZES = [((height, width), budget) for height, width in ((1, 900), (47, 49), (720, 1280)) for budget in BUDGETS]
SIZES += [((1, 1), 70), ((900, 1), 70), ((3, 900), 140), ((48, 48), 280), ((96, 1000), 280), ((1, 4000), 560), ((3000, 4000), 1120)]


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(raster: np.ndarray[Any, Any]) -> bytes:
    return saved(Image.fromarray(raster), "PNG", compress_level=0)


def prepare(data: bytes, budget: int | None = None, **more: Any) -> Prepared:
    return rasters.prepare_image(DecodeTask(kind="image", media_type="image/png", budget=budget, **more), data)


def pixels(prepared: Prepared) -> np.ndarray[Any, Any]:
    return np.frombuffer(prepared.data, np.uint8).reshape(prepared.shape)


def torchvisions(raster: np.ndarray[Any, Any], size: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """What torchvision's resize calls for a uint8 tensor, bicubic with antialias."""
    tensor = torch.from_numpy(raster).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(tensor, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("size", "budget"), SIZES)
def test_images_are_transformers(size: tuple[int, int], budget: int) -> None:
    """Soft tokens, patches and their order are its processor's. Values are, bit for bit, those of the call that torchvision makes;
    Pillow, which transformers uses where there is no torchvision, rounds otherwise, by 2 of 255 at most."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    raster = picture(*size)
    made = prepare(png(raster), budget)
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget)(images=Image.fromarray(raster), return_tensors="np")
    count = int(theirs["num_soft_tokens_per_image"][0])
    assert made.text == f"<|image>{'<|image|>' * count}<image|>"
    ours = pixels(made)
    assert np.array_equal(ours, torchvisions(raster, made.shape[:2]))
    patches = np.rint(theirs["pixel_values"][0] * 255)[: count * 9]
    assert np.abs(patches_of(ours) - patches).max() <= 2
    if size == (47, 49):
        assert np.abs(patches_of(ours[:, ::-1]) - patches).max() >= 200, "a mirrored image would show"
        assert not np.array_equal(ours, torchvisions(raster[::-1].copy(), made.shape[:2])), "and so would one upside down"


def patches_of(raster: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """int [rows * columns of 16 x 16 pixels, 768]"""
    rows, columns = raster.shape[0] // 16, raster.shape[1] // 16
    return raster.reshape(rows, 16, columns, 16, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, 768).astype(int)


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    """528 x 528 is what a budget of 121 tokens gives: every value stays."""
    raster = picture(528, 528)
    assert np.array_equal(pixels(prepare(png(raster), 140)), raster)


@pytest.mark.parametrize(
    ("size", "budget"),
    [
        ((10, 10), 70), ((336, 336), 70), ((480, 480), 140), ((768, 768), 280), ((700, 900), 560), ((720, 1280), 560),
        ((4000, 3000), 1120),
    ],
)
def test_auto_is_the_least_budget_that_does_not_shrink(size: tuple[int, int], budget: int) -> None:
    """No side gets smaller, and with the next smaller budget one would; a limit holds it down."""
    assert rasters.least_budget(*size, 1120) == budget
    assert rasters.least_budget(*size, 140) == min(budget, 140)
    smaller = [one for one in BUDGETS if one < budget]
    if smaller:
        rows, columns = rasters.target_size(*size, smaller[-1])
        assert rows < size[0] or columns < size[1]


SHADES = np.stack([np.linspace(0, 255, 96, dtype=np.uint8)] * 96)
COLOURS = np.stack([SHADES, SHADES.T, 255 - SHADES], 2)


def test_modes_become_rgb() -> None:
    """What is transparent lies on white, 16 bits are their upper 8, grey is grey, a palette is its colours."""
    image, alpha = Image.fromarray(COLOURS), Image.fromarray(SHADES)
    with_alpha = image.copy()
    with_alpha.putalpha(alpha)
    over_white = COLOURS * (SHADES / 255)[..., None] + 255 - SHADES[..., None].astype(float)
    palette = with_alpha.quantize(16)
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), palette.convert("RGBA")).convert("RGB")
    cases = [
        (saved(with_alpha, "PNG"), over_white, 1),
        (saved(palette, "PNG"), np.array(flat), 0),
        (saved(alpha, "PNG"), np.stack([SHADES] * 3, 2), 0),
        (saved(Image.fromarray(SHADES.astype(np.uint16) * 257), "PNG"), np.stack([SHADES] * 3, 2), 0),
        (saved(Image.fromarray(SHADES > 127), "PNG"), np.stack([(SHADES > 127) * 255] * 3, 2), 0),
        (saved(image.convert("CMYK"), "JPEG", quality=100, subsampling=0), COLOURS, 8),
        (saved(image, "WEBP", lossless=True), COLOURS, 0),
        (saved(image, "BMP"), COLOURS, 0),
    ]
    for place, (data, expected, tolerance) in enumerate(cases):
        decoded = rasters.upright(rasters.opened(data, 1 << 20))
        assert np.abs(rasters._rgb(decoded) - np.asarray(expected, float)).max() <= tolerance, place


def test_exif_turns_a_photo() -> None:
    """Orientation 6 is a quarter turn: the prompt's positions are those of the picture as people see it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    raster = picture(96, 480)
    made = prepare(saved(Image.fromarray(raster), "PNG", exif=exif), 70)
    assert np.array_equal(pixels(made), torchvisions(np.ascontiguousarray(np.rot90(raster, -1)), made.shape[:2]))
    assert made.shape[0] > made.shape[1]


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_pillows(orientation: int) -> None:
    """And nothing else of EXIF is looked at: Pillow's own refuses a photo of which another tag is odd. Another turn would show."""
    exif, odd = Image.Exif(), b"MM\0*\0\0\0\x08\0\x02" + struct.pack(">HHI4s", 0x0100, 2, 3, b"ab\0\0")
    exif[0x0112] = orientation
    image = Image.fromarray(picture(48, 96))
    good, bad = (
        Image.open(io.BytesIO(saved(image, "PNG", exif=tags)))
        for tags in (exif.tobytes(), odd + struct.pack(">HHIHHI", 0x0112, 3, 1, orientation, 0, 0))
    )
    expected = np.asarray(ImageOps.exif_transpose(good))
    for photo in (good, bad):
        assert np.array_equal(np.asarray(rasters.upright(photo)), expected)
    assert not np.array_equal(np.asarray(rasters.upright(bad).transpose(Image.Transpose.ROTATE_180)), expected)
    if orientation in range(2, 9):
        with pytest.raises(struct.error):
            ImageOps.exif_transpose(bad)


def test_of_an_animation_the_first_frame_is_read() -> None:
    """As other servers do with a GIF that is sent as an image."""
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        made = pixels(prepare(saved(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)))
        assert np.abs(made.astype(int) - [255, 0, 0]).max() <= 1, form


def test_digests_are_of_what_the_encoder_gets() -> None:
    """Two files of the same pixels are the same; another pixel, or the same bytes in another shape, is not."""
    raster = picture(96, 192)
    image = Image.fromarray(raster)
    assert prepare(saved(image, "PNG")).digest == prepare(saved(image, "BMP")).digest
    other = raster.copy()
    other[0, 0, 0] ^= 255
    assert prepare(png(other)).digest != prepare(png(raster)).digest
    wide, high = (rasters.prepared("image", raster.reshape(shape), "") for shape in ((96, 192, 3), (192, 96, 3)))
    assert wide.data == high.data
    assert wide.digest != high.digest


JPEG = saved(Image.fromarray(COLOURS), "JPEG")
PNG = saved(Image.fromarray(COLOURS), "PNG")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    "data",
    [b"", b"text", SVG, b"<?xml version='1.0'?>" + SVG, b"%PDF-1.7", b"II*\0" + bytes(64), b"%!PS-Adobe-3.0 EPSF-3.0\n", PNG[:30]],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    """Also formats that Pillow knows and we do not read, some of which run programs."""
    with pytest.raises(InvalidRequest, match="not one of JPEG"):
        prepare(data)


@pytest.mark.parametrize("data", [JPEG[: len(JPEG) // 2], PNG[: len(PNG) // 2], PNG[:60] + bytes(40) + PNG[100:]])
def test_what_is_damaged_is_refused(data: bytes) -> None:
    """Nothing is made up for what is absent."""
    with pytest.raises((OSError, SyntaxError)):
        prepare(data)


def test_a_polyglot_is_the_image_that_it_begins_with() -> None:
    """What follows it is not looked at."""
    for image in (PNG, JPEG):
        assert prepare(image + b"PK\x03\x04<script>" + SVG).digest == prepare(image).digest


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and has no more."""
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + head + zlib.crc32(head).to_bytes(4, "big") + bytes(4) + b"IDAT"


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (1 << 20, 1), (1, 1 << 20), (5001, 5000)])
def test_too_many_pixels_are_refused_by_the_header(width: int, height: int) -> None:
    """Before anything is decoded: there is nothing to decode."""
    with pytest.raises(InvalidRequest, match="pixels"):
        prepare(png_header(width, height), pixels=25_000_000)


def test_auto_shrinks_neither_side() -> None:
    """Of 500 random sizes. A budget that spares one side alone is not enough, and there are sizes that tell."""
    rng, tell = np.random.default_rng(5), 0
    for height, width in rng.integers(30, 1200, (500, 2)).tolist():
        budget = rasters.least_budget(height, width, BUDGETS[-1])
        targets = [(one, rasters.target_size(height, width, one)) for one in BUDGETS]
        whole = [one for one, (rows, columns) in targets if rows >= height and columns >= width]
        half = [one for one, (rows, columns) in targets if rows >= height or columns >= width]
        assert budget == (whole[0] if whole else BUDGETS[-1])
        tell += bool(half) and half[0] != budget
    assert tell > 5


@pytest.mark.parametrize("scans", [rasters.MAX_SCANS, rasters.MAX_SCANS + 1])
def test_scans_are_counted_outside_of_segments(scans: int) -> None:
    """A comment as the first segment may hold what looks like scans; as segments of the file one too many is refused."""
    scan = b"\xff\xda\x00\x02"
    comment = scan * (rasters.MAX_SCANS + 1)
    head = b"\xff\xd8\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment
    jpeg = head + scan * scans + b"\xff\xd9" + scan
    if scans <= rasters.MAX_SCANS:
        rasters._check_scans(jpeg)
        return
    with pytest.raises(InvalidRequest, match="more than 50 scans"):
        rasters._check_scans(jpeg)
