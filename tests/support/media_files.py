"""Small files of pictures, sound and film, as Pillow and ffmpeg's encoders write them."""

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

from deploy.edge.media.audio_features import RATE, Array


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """The file of an image."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def sound(samples: Array, codec: str, form: str, rate: int = RATE) -> bytes:
    """Of float samples [n]; flac keeps their upper 16 bits."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        track = container.add_stream(codec, rate=rate, layout="mono")
        steps, coded = np.round(samples * 2**15).astype(np.int16), av.AudioResampler(track.codec_context.format)
        track.codec_context.open()
        size = track.codec_context.frame_size or 4096
        for start in range(0, len(steps), size):
            frame = av.AudioFrame.from_ndarray(steps[None, start : start + size], "s16", "mono")
            frame.rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            container.mux(track.encode(coded.resample(frame)[0]))
        container.mux(track.encode(None))
    return stream.getvalue()


def film(frames: Sequence[Any], codec: str, form: str, rate: int = 24, times: Sequence[int] = (), **options: str) -> bytes:
    """Of uint8 [height, width, 3]; both sides are even. `times`: theirs in ms, none: those of the rate."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        track = container.add_stream(codec, rate=rate, options={"threads": "1", **options})
        track.height, track.width, track.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for at, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[at], Fraction(1, 1000)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return stream.getvalue()


def moving(count: int, height: int = 96, width: int = 160) -> list[Any]:
    """Frames of which no two are alike: a ramp that moves on."""
    across = np.arange(width) + np.arange(height)[:, None]
    planes = [((across + 5 * at) % 256, (2 * across + at) % 256, across * 0 + 2 * at % 256) for at in range(count)]
    return [np.stack(colours, -1).astype(np.uint8) for colours in planes]


def declared(seconds: int = 1, frames: int = 2, side: int | None = None) -> bytes:
    """An MP4 of two frames whose header says something else."""
    mp4 = bytearray(film(moving(2), "libx264", "mp4").replace(b"edts", b"free"))
    tables = mp4.index(b"moov")
    values = [("mdhd", 20, seconds * 12288), ("stts", 12, frames), ("stts", 16, seconds * 12288 // frames), ("stsc", 16, frames)]
    if frames > 2:  # all of one size, so that no table need say them
        values += [("stsz", 8, 1), ("stsz", 12, frames)]
    if side:
        values += [("avc1", 28, side << 16 | side)]
    for box, behind, value in values:
        at = mp4.index(box.encode(), tables) + behind
        mp4[at : at + 4] = struct.pack(">I", value)
    return bytes(mp4)


def many_blocks(count: int) -> bytes:
    """A WebM of so many frames of one byte, which no header counts."""
    webm = film(moving(2), "libvpx", "webm")
    segment, cluster, unknown = webm.index(b"\x18\x53\x80\x67") + 4, webm.index(b"\x1f\x43\xb6\x75"), b"\x01" + b"\xff" * 7
    head = webm[:segment] + unknown + webm[segment + 8 : cluster + 4]
    return head + unknown + b"\xe7\x81\x00" + b"\xa3\x85\x81\x00\x00\x00\x00" * count
