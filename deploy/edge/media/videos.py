"""Videos as transformers' Gemma 4 processor makes them: at most 32 frames, evenly, each of 70 soft
tokens, with its time.

    mm:ss <|image> n x <|video|> <image|>, joined by spaces

Formats: MP4, MOV, WebM, animated GIF, WebP and PNG, and vLLM's
data:video/jpeg;base64,FRAME,FRAME,...
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from av import Packet, VideoFrame
from av.video.stream import VideoStream
from PIL import Image, ImageSequence

from deploy.edge.media.base64_reader import unbase64
from deploy.edge.media.containers import demuxer, opened_stream
from deploy.edge.media.rasters import check_pixels, opened, prepared, resized, soft_tokens, target_size, upright
from deploy.edge.media.tasks import FRAMES_TYPE, DecodeTask, Prepared
from engine.errors import InvalidRequest

FRAMES = 32  # that are looked at
FRAME_BUDGET = 70
FILMED_FRAMES = 108_000  # of a container: an hour at 30 a second
FILMED_PIXELS = 10_000_000_000  # of all frames of a container that must be decoded: more take longer than a process may
DECODED_FRAMES = 4  # times the pixels of an image: an animation's frames are decoded up to the last that is looked at
TimedFrames = Iterator[tuple[Image.Image, float]]  # each with its second
_FILMS = ("mov", "matroska")
_UNTIMED_FPS = 24  # transformers' for frames without times
_DEFAULT_MS = 100  # of an animation's frame that does not say how long it stays


def prepare_video(task: DecodeTask, data: bytes) -> Prepared:
    """InvalidRequest: unreadable."""
    rasters = []
    times = []
    size = None
    frames = _listed if task.media_type == FRAMES_TYPE else _filmed if demuxer(data) in _FILMS else _animated
    for frame, time in frames(task, data):
        size = size or frame.size
        if frame.size != size:
            raise InvalidRequest("its frames differ in size")
        rasters.append(resized(frame, target_size(frame.height, frame.width, FRAME_BUDGET)))
        times.append(time)
    if not rasters:
        raise InvalidRequest("it has no frames")
    raster = np.stack(rasters)
    run = f"<|image>{'<|video|>' * soft_tokens(raster)}<image|>"
    text = " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {run}" for time in times)
    return prepared("video", raster, text, len(rasters))


def _listed(task: DecodeTask, data: bytes) -> TimedFrames:
    sources = data.split(b",")
    most = DECODED_FRAMES * task.pixels // min(len(sources), FRAMES)
    for index in _sampled(len(sources)):
        yield upright(opened(unbase64(sources[index]), most)), index / _UNTIMED_FPS


def _animated(task: DecodeTask, data: bytes) -> TimedFrames:
    try:
        animation = opened(data, task.pixels)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; videos are MP4, MOV, WebM, animated GIF, WebP or PNG, or {FRAMES_TYPE} frames") from None
    count = int(getattr(animation, "n_frames", 1))
    pixels = animation.width * animation.height * count
    if pixels > DECODED_FRAMES * task.pixels:
        raise InvalidRequest(f"its {count} frames have {pixels} pixels; at most {DECODED_FRAMES * task.pixels} are read")
    sampled = _sampled(count)
    milliseconds = 0  # whole ones, as files state them: a sum of seconds would miss the border of a second
    for index, frame in enumerate(ImageSequence.Iterator(animation)):
        if index in sampled:
            yield frame, milliseconds / 1000
        frame.load()  # before, a WebP's does not say how long it stays
        milliseconds += round(frame.info.get("duration") or _DEFAULT_MS)


def _filmed(task: DecodeTask, data: bytes) -> TimedFrames:
    stream = opened_stream(data, "video", task.video_seconds, task.pixels)
    check_pixels(stream.width, stream.height, task.pixels)
    packets = _packets(stream)
    shown = [number for number, packet in enumerate(packets) if not packet.is_discard]
    order = sorted(shown, key=lambda number: _time(packets[number]))
    sampled = _sampled(len(order))
    stream.codec_context.options = {"max_pixels": str(task.pixels)}
    rate = _rate(stream, [_time(packets[number]) for number in order])
    chosen = [order[index] for index in sampled]
    begins = _begins(packets, chosen)
    pixels = stream.width * stream.height * _count(begins, chosen)
    if pixels > FILMED_PIXELS:
        raise InvalidRequest(f"{pixels} pixels of frames would have to be decoded; at most {FILMED_PIXELS} are")
    for index, frame in zip(sampled, _decoded(stream, packets, begins, chosen), strict=True):
        yield Image.fromarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)), index / rate


def _rate(stream: Any, times: Sequence[int]) -> float:
    """The header's or, where times contradict it (Matroska), the mean."""
    rate = float(stream.average_rate or _UNTIMED_FPS)
    tick = float(stream.time_base)
    seconds = (times[-1] - times[0]) * tick if times else 0.0
    steps = len(times) - 1
    is_belied = "matroska" in stream.container.format.name and abs(steps / rate - seconds) > 2 * tick  # times are rounded
    if seconds and is_belied:
        return steps / seconds
    return rate


def _packets(stream: Any) -> list[Packet]:
    """Packets of all frames. InvalidRequest: too many."""
    full = (packet for packet in stream.container.demux(stream) if packet.size)
    if stream.frames > FILMED_FRAMES:
        packets = []
    else:
        packets = list(islice(full, FILMED_FRAMES + 1))
    if (count := max(stream.frames, len(packets))) > FILMED_FRAMES:
        raise InvalidRequest(f"it has {count} frames or more; at most {FILMED_FRAMES} are read")
    return packets


def _begins(packets: Sequence[Packet], chosen: Sequence[int]) -> list[int]:
    """The key frame before each of these packets."""
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    begins = []
    for number in chosen:
        before = keys[: bisect_right(keys, number)][-2:]  # a frame may be shown before the key frame that it is stored after
        begins.append(max((key for key in before if _time(packets[key]) <= _time(packets[number])), default=0))
    return begins


def _count(begins: Sequence[int], chosen: Sequence[int]) -> int:
    count = end = 0
    for begin, number in zip(begins, chosen, strict=True):
        count += max(0, number + 1 - max(begin, end))
        end = max(end, number + 1)
    return count


def _decoded(
    stream: VideoStream, packets: Sequence[Packet], begins: Sequence[int], chosen: Sequence[int]
) -> Iterator[VideoFrame]:
    context = stream.codec_context
    frames: Iterator[VideoFrame] = iter(())
    frame = None
    begun = -1
    for begin, number in zip(begins, chosen, strict=True):
        if begin > begun:
            context.flush_buffers()
            frames = (decoded for packet in [*packets[begin:], None] for decoded in context.decode(packet))
            begun = begin
        while frame is None or _time(frame) < _time(packets[number]):
            if (following := next(frames, None)) is None:
                break
            frame = following
        if frame is None:
            raise InvalidRequest("none of its frames can be decoded")
        yield frame


def _time(shown: Packet | VideoFrame) -> int:
    return shown.pts or 0


def _sampled(count: int) -> Sequence[int]:
    if count <= FRAMES:
        return range(count)
    return [index * count // FRAMES for index in range(FRAMES)]
