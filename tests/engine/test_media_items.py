"""What the core takes for a media item: data of a row for each of its positions, of a kind that the model has an encoder for."""

from dataclasses import replace

import msgspec
import pytest

from engine.audio_geometry import AudioGeometry
from engine.errors import InvalidRequest
from engine.geometry import KVGroup
from engine.media_geometry import read_media
from engine.protocol import MediaItem
from tests.conftest import Nano
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of

pytestmark = pytest.mark.pure

MELS = MediaItem(1, 3, bytes(32), (), "audio", (9, 128), bytes(4 * 9 * 128))
ROWS = MediaItem(1, 3, bytes(32), (), "audio", (3, 640), bytes(4 * 3 * 640))


def encoder(nano: Nano, member: str) -> AudioGeometry:
    geometry = read_media(nano(member))["audio"]
    assert isinstance(geometry, AudioGeometry)
    return geometry


@pytest.mark.parametrize(("member", "item"), [("e2b", MELS), ("12b", ROWS)])
def test_a_clip_fits_its_positions(nano: Nano, member: str, item: MediaItem) -> None:
    """One token, row, byte or feature too many or too few is refused, and so is a span."""
    check = encoder(nano, member).check
    check(item)
    rows, features = item.shape
    for wrong in ({"length": 2}, {"length": 4}, {"shape": (rows + 4, features)}, {"shape": (rows, features - 1)}, {"shape": ()},
                  {"data": item.data[4:]}, {"spans": ((1, 4),)}):  # fmt: skip
        with pytest.raises(InvalidRequest, match="do not fit"):
            check(msgspec.structs.replace(item, **wrong))


@pytest.mark.parametrize("member", ["e2b", "31b"])
def test_a_model_takes_what_it_has_an_encoder_for(nano: Nano, member: str) -> None:
    """A clip is refused by a model that hears nothing, and by any that is asked to read text alone."""
    assert read_media(nano(member), language_model_only=True) == {}
    config = SchedulerConfig((KVGroup(0, "full", (0,), 1, 256, None),), (9,), 2, 128, 64, encoders=read_media(nano(member)))
    for encoders, taken in ((config.encoders, member == "e2b"), ({}, False)):
        scheduler = scheduler_of(replace(config, encoders=encoders))
        scheduler.requests.add(request_of(1, range(6), media=(MELS,)))
        errors = [output.error for output in scheduler.requests.drain()]
        assert errors == ([] if taken else ["this model takes no audio"])
