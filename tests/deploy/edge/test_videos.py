"""Videos as transformers' Gemma 4 processor has them: which frames, their times, sizes and texts, and what is refused."""

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deploy.edge.media import videos
from deploy.edge.media.rasters import prepare_image
from deploy.edge.media.tasks import FRAMES_TYPE, DecodeTask, Prepared
from engine.errors import InvalidRequest

pytestmark = pytest.mark.cpu


def frame(shade: int, height: int = 90, width: int = 160) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, 255 - shade, 0))


def saved(frames: list[Image.Image], form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    frames[0].save(stream, form, **({"save_all": True, "append_images": frames[1:]} if frames[1:] else {}), **options)
    return stream.getvalue()


def listed(frames: list[Image.Image]) -> bytes:
    return b",".join(base64.b64encode(saved([one], "JPEG", quality=95)) for one in frames)


def prepare(data: bytes, media_type: str = "", **more: Any) -> Prepared:
    return videos.prepare_video(DecodeTask(kind="video", media_type=media_type, **more), data)


def shades(prepared: Prepared) -> list[int]:
    """Of the frames."""
    return [int(value) for value in np.frombuffer(prepared.data, np.uint8).reshape(prepared.shape)[:, 9, 9, 0]]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_frames_at_their_times(form: str) -> None:
    """Three of a second and a half each: at 0, 1 and 3 seconds, each as an image of a budget of 70."""
    made = prepare(saved([frame(0), frame(100), frame(200)], form, duration=1500, lossless=True))
    alone = prepare_image(DecodeTask(budget=70), saved([frame(100)], "PNG"))
    assert (made.shape, made.runs) == ((3, *alone.shape), 3)
    assert np.abs(np.array(shades(made)) - [0, 100, 200]).max() <= 8
    run = alone.text.replace("<|image|>", "<|video|>")
    assert made.text == f"00:00 {run} 00:01 {run} 00:03 {run}"


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100, 999])
def test_frames_are_sampled_as_transformers_does(count: int) -> None:
    """Every one up to 32, then 32 at even steps from the first."""
    if count > 32:
        assert list(videos._sampled(count, 32)) == np.arange(0, count, count / 32).astype(int).tolist()
    else:
        assert list(videos._sampled(count, 32)) == list(range(count))


def test_texts_are_transformers() -> None:
    """Of its processor, for the frames that were sampled; minutes go beyond 60. A frame too few would show."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    made = prepare(listed([frame(2 * place) for place in range(100)]), FRAMES_TYPE)
    processor = Gemma4Processor.__new__(Gemma4Processor)
    processor.boi_token, processor.video_token, processor.eoi_token = "<|image>", "<|video|>", "<image|>"
    metadata = SimpleNamespace(fps=24, timestamps=[index / 24 for index in videos._sampled(100, 32)])
    count = made.shape[1] * made.shape[2] // 48**2
    about = {"num_soft_tokens_per_video": [count], "video_metadata": [metadata]}
    assert made.text == processor.replace_video_token(about, 0)
    assert np.abs(np.array(shades(made)) - [2 * index for index in videos._sampled(100, 32)]).max() <= 3
    metadata.timestamps = metadata.timestamps[1:]
    assert made.text != processor.replace_video_token(about, 0)


def test_what_is_no_video_is_refused() -> None:
    """Containers of codecs by a sentence that says what is read; several sizes; too many pixels, before any is decoded."""
    mp4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + bytes(100)
    for data, media_type, says in (
        (mp4, "video/mp4", "animated GIF, WebP or PNG, or as video/jpeg"),
        (listed([frame(0), frame(0, 90, 90)]), FRAMES_TYPE, "differ in size"),
        (saved([frame(shade) for shade in range(99)], "GIF"), "", "99 frames have 1425600 pixels"),
        (listed([frame(0, 900, 900)] * 32), FRAMES_TYPE, "900 x 900 pixels"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            prepare(data, media_type, pixels=300_000)
