"""What the core takes for a media item: a shape with a row for each of its positions."""

import json
from pathlib import Path

import msgspec
import pytest

from engine.audio_geometry import AudioGeometry, read_audio
from engine.errors import InvalidRequest
from engine.protocol import PlacedItem
from engine.vision_geometry import read_vision
from tests.conftest import Nano

pytestmark = pytest.mark.pure

MELS = PlacedItem(1, 3, bytes(32), (), "audio", (9, 128), 0)
ROWS = PlacedItem(1, 3, bytes(32), (), "audio", (3, 640), 0)


def encoder(nano: Nano, member: str) -> AudioGeometry:
    geometry = read_audio(nano(member))
    assert isinstance(geometry, AudioGeometry)
    return geometry


@pytest.mark.parametrize(("member", "item"), [("e2b", MELS), ("12b", ROWS)])
def test_a_clip_fits_its_positions(nano: Nano, member: str, item: PlacedItem) -> None:
    """One token, row, byte or feature too many or too few is refused, and so is a span."""
    check = encoder(nano, member).check
    check(item)
    rows, features = item.shape
    for wrong in ({"length": 2}, {"length": 4}, {"shape": (rows + 4, features)}, {"shape": (rows, features - 1)}, {"shape": ()},
                  {"spans": ((1, 4),)}):  # fmt: skip
        with pytest.raises(InvalidRequest, match="does not fit"):
            check(msgspec.structs.replace(item, **wrong))


def pixels(height: int, width: int, length: int) -> PlacedItem:
    return PlacedItem(1, length, bytes(32), ((1, 1 + length),), "image", (height, width, 3), 0)


def test_a_picture_fits_its_positions(nano: Nano) -> None:
    """Sides that are no whole cells, or longer than the table of positions, are refused; the longest that there may be is not."""
    vision = read_vision(nano("31b"))
    assert vision is not None
    vision.check(pixels(96, 144, 6))
    vision.check(pixels(48, 48 * vision.longest, vision.longest))
    too_long = pixels(48, 48 * vision.longest + 48, vision.longest + 1)
    for wrong in (pixels(97, 144, 6), pixels(96, 145, 6), too_long, pixels(96, 144, 5)):
        with pytest.raises(InvalidRequest):
            vision.check(wrong)


def test_the_longest_side_is_in_cells(nano: Nano) -> None:
    """The 12B's embedder has a table entry for each cell, towers for each patch, three to a cell."""
    tower, embedder = (read_vision(nano(member)) for member in ("31b", "12b"))
    assert tower is not None
    assert embedder is not None
    assert (3 * tower.longest, embedder.longest) == (tower.positions // 3 * 3, embedder.positions)


def test_what_config_leaves_out_has_defaults(nano: Nano, tmp_path: Path) -> None:
    """A tower without rope_parameters turns by a theta of 100, and the 12B's embedder has a layer without any width."""
    config = json.loads((nano("31b") / "config.json").read_text())
    config["vision_config"].pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tower = read_vision(tmp_path)
    embedder = read_vision(nano("12b"))
    assert tower is not None
    assert embedder is not None
    assert {layer.rope.theta for layer in tower.layers} == {100.0}
    [layer] = embedder.layers
    assert (layer.head_dim, layer.kv_heads, layer.intermediate) == (0, 1, 0)
