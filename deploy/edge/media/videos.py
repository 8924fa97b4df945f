"""Videos as transformers' Gemma 4 processor has them: 32 frames at most, evenly, each resized to 70 soft tokens, with its time.

    mm:ss <|image> n x <|video|> <image|>, joined by spaces

Read are animated GIF, WebP and PNG, and vLLM's form of frames: data:video/jpeg;base64,FRAME,FRAME,... Containers of video codecs
are not: their decoders are no dependency of ours.
"""

import base64
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, ImageSequence

from deploy.edge.media.rasters import opened, prepared, resized, soft_tokens, target_size, upright
from deploy.edge.media.tasks import FRAMES_TYPE, DecodeTask, Prepared
from engine.errors import InvalidRequest

FRAME_BUDGET = 70
DECODED_FRAMES = 4  # times the pixels of an image: an animation's frames are decoded up to the last that is looked at
_UNTIMED_FPS = 24  # transformers' for frames without times
_DEFAULT_MS = 100  # of an animation's frame that does not say how long it stays


def prepare_video(task: DecodeTask, data: bytes) -> Prepared:
    """InvalidRequest."""
    rasters, times, size = [], [], None
    for frame, time in (_listed if task.media_type == FRAMES_TYPE else _animated)(task, data):
        size = size or frame.size
        if frame.size != size:
            raise InvalidRequest("its frames differ in size")
        rasters.append(resized(frame, target_size(frame.height, frame.width, FRAME_BUDGET)))
        times.append(time)
    raster = np.stack(rasters)
    run = f"<|image>{'<|video|>' * soft_tokens(raster)}<image|>"
    text = " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {run}" for time in times)
    return prepared("video", raster, text, len(rasters))


def _listed(task: DecodeTask, data: bytes) -> Iterator[tuple[Image.Image, float]]:
    """Frames, each base64 of its own."""
    sources = data.split(b",")
    most = DECODED_FRAMES * task.pixels // min(len(sources), task.frames)
    for index in _sampled(len(sources), task.frames):
        yield upright(opened(base64.b64decode(sources[index]), most)), index / _UNTIMED_FPS


def _animated(task: DecodeTask, data: bytes) -> Iterator[tuple[Image.Image, float]]:
    try:
        animation = opened(data, task.pixels)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; videos are read as animated GIF, WebP or PNG, or as {FRAMES_TYPE} frames") from None
    count = int(getattr(animation, "n_frames", 1))
    pixels = animation.width * animation.height * count
    if pixels > DECODED_FRAMES * task.pixels:
        raise InvalidRequest(f"its {count} frames have {pixels} pixels; at most {DECODED_FRAMES * task.pixels} are read")
    sampled, time = _sampled(count, task.frames), 0.0
    for index, frame in enumerate(ImageSequence.Iterator(animation)):
        if index in sampled:
            yield frame, time
        time += (frame.info.get("duration") or _DEFAULT_MS) / 1000


def _sampled(count: int, most: int) -> Sequence[int]:
    """Indices of `most` frames at even steps, or of all."""
    return range(count) if count <= most else [place * count // most for place in range(most)]
