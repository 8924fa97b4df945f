"""Videos as transformers' Gemma 4 processor has them: which frames, their times, sizes and texts, and what is refused."""

import base64
import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import av
import numpy as np
import pytest
from PIL import Image, WebPImagePlugin
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from deploy.edge.media import containers, videos
from deploy.edge.media.audio_features import RATE
from deploy.edge.media.rasters import prepare_image
from deploy.edge.media.tasks import FRAMES_TYPE, DecodeTask, Prepared
from engine.errors import InvalidRequest
from tests.support.media_files import declared, film, moving, sound
from tests.support.wav_files import tone

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


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_frames_that_are_left_out_take_their_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other of 64, which stays for a second; the others for a half. Planted: a WebP's frames are not decoded, and do not
    say how long they stay."""
    data = saved([frame(3 * shade, 16, 16) for shade in range(64)], form, duration=[500, 1000] * 32, lossless=True)

    def times() -> list[float]:
        return [time for _, time in videos._animated(DecodeTask(kind="video"), data)]

    assert times() == [1.5 * index for index in range(32)]
    monkeypatch.setattr(WebPImagePlugin.WebPImageFile, "load", lambda image: None)
    assert (times()[-1] == 1.5 * 31) is (form != "WEBP")


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100, 999])
def test_frames_are_sampled_as_transformers_does(count: int) -> None:
    """Every one up to 32, then 32 at even steps from the first."""
    if count > 32:
        assert list(videos._sampled(count)) == np.arange(0, count, count / 32).astype(int).tolist()
    else:
        assert list(videos._sampled(count)) == list(range(count))


def test_texts_are_transformers() -> None:
    """Of its processor, for the frames that were sampled; minutes go beyond 60. A frame too few would show."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    made = prepare(listed([frame(2 * place) for place in range(100)]), FRAMES_TYPE)
    processor = Gemma4Processor.__new__(Gemma4Processor)
    processor.boi_token, processor.video_token, processor.eoi_token = "<|image>", "<|video|>", "<image|>"
    metadata = SimpleNamespace(fps=24, timestamps=[index / 24 for index in videos._sampled(100)])
    count = made.shape[1] * made.shape[2] // 48**2
    about = {"num_soft_tokens_per_video": [count], "video_metadata": [metadata]}
    assert made.text == processor.replace_video_token(about, 0)
    assert np.abs(np.array(shades(made)) - [2 * index for index in videos._sampled(100)]).max() <= 3
    metadata.timestamps = metadata.timestamps[1:]
    assert made.text != processor.replace_video_token(about, 0)


CONTAINERS: list[tuple[str, str, dict[str, str]]] = [
    ("libx264", "mp4", {"g": "12", "bf": "3"}),
    ("libx264", "mov", {}),
    ("libx265", "mp4", {"x265-params": "keyint=20:bframes=4:open-gop=1:log-level=none:pools=1:frame-threads=1"}),
    ("libvpx-vp9", "webm", {"g": "15", "cpu-used": "8", "deadline": "realtime"}),
    ("libvpx", "webm", {"g": "15", "auto-alt-ref": "1", "lag-in-frames": "10"}),
    ("libsvtav1", "mp4", {"preset": "12", "svtav1-params": "lp=1"}),
]


@pytest.mark.parametrize(("codec", "form", "options"), CONTAINERS)
def test_a_containers_frames_are_transformers(codec: str, form: str, options: dict[str, str]) -> None:
    """To the bit those at its indices of a film that is decoded from end to end, at index / rate; one frame on would be another."""
    data = film(moving(75), codec, form, **options)
    with av.open(io.BytesIO(data)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == 75
    indices = default_sample_indices_fn(VideoMetadata(total_num_frames=75), num_frames=32)
    made = list(videos._filmed(DecodeTask(kind="video"), data))
    assert [time for _, time in made] == [index / 24 for index in indices]
    assert all(np.array_equal(np.asarray(frame), decoded[index]) for (frame, _), index in zip(made, indices, strict=True))
    assert not any(np.array_equal(np.asarray(frame), decoded[index - 1]) for (frame, _), index in zip(made, indices, strict=True))


@pytest.mark.parametrize("guesses", [False, True])
def test_a_recording_of_an_uneven_rate_keeps_its_length(guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A WebM of 60 frames at 30 a second, then 60 a second apart: index / mean rate. Planted: the rate that ffmpeg guesses."""
    times = [33 * index for index in range(60)] + [2000 + 1000 * index for index in range(60)]
    data = film(moving(120), "libvpx", "webm", rate=30, times=times, deadline="realtime")
    if guesses:
        monkeypatch.setattr(videos, "_rate", lambda stream, times: float(stream.average_rate))
    made = [time for _, time in videos._filmed(DecodeTask(kind="video"), data)]
    worst = np.abs(np.array(videos._sampled(120)) * times[-1] / 1000 / 119 - made).max()
    assert worst > 10 if guesses else worst < 1e-3  # the times of a WebM are of milliseconds


def test_a_container_is_its_frames_in_the_prompt() -> None:
    """Each of 70 soft tokens at most, with its time; what a phone filmed upright is upright."""
    wide = film(moving(48), "libx264", "mp4")
    made = prepare(wide)
    assert (made.shape, made.runs) == ((32, 288, 480, 3), 32)
    assert made.text.startswith(f"00:00 <|image>{'<|video|>' * 60}<image|> 00:00 ")
    assert made.text.count("00:01 ") == 16
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 96 << 16, 0, 1 << 30)
    head = wide.index(b"tkhd") + 44
    [(first, _), *_] = videos._filmed(DecodeTask(kind="video"), wide)
    [(turned, _), *_] = videos._filmed(DecodeTask(kind="video"), wide[:head] + matrix + wide[head + 36 :])
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(first), -1))


def test_nothing_else_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A playlist is no format of ours; were it one, what it names would not be opened, which by itself ffmpeg does."""
    (tmp_path / "a.mp4").write_bytes(film(moving(2), "libx264", "mp4"))
    monkeypatch.chdir(tmp_path)
    playlist = b"ffconcat version 1.0\nfile a.mp4\n"
    assert containers.demuxer(playlist) is None
    monkeypatch.setitem(containers._DEMUXERS, "concat", rb"ffconcat")
    with pytest.raises(av.error.FFmpegError):
        containers.opened_stream(playlist, "video", 60, 1 << 20)
    with av.open(io.BytesIO(playlist), format="concat") as container:
        assert container.streams.video[0].width == 160


def test_what_is_no_video_is_refused() -> None:
    """By a sentence that says what is read: what is none, several sizes; too many pixels, seconds or frames, before decoding."""
    for data, media_type, says in (
        (b"#EXTM3U\nhttp://127.0.0.1/", "video/mp4", "videos are MP4, MOV, WebM, animated GIF, WebP or PNG, or video/jpeg"),
        (film(moving(2), "mpeg4", "mp4"), "video/mp4", "its video is mpeg4; read are h264"),
        (film(moving(2, 900, 900), "libx264", "mp4"), "", "900 x 900 pixels"),
        (sound(tone(RATE, 440), "aac", "mp4"), "", "it holds no video"),
        (declared(7200, 2), "", "7200 s of video; at most 3600"),
        (declared(1, 1_000_000), "", "1000000 frames or more; at most 108000"),
        (listed([frame(0), frame(0, 90, 90)]), FRAMES_TYPE, "differ in size"),
        (saved([frame(shade) for shade in range(99)], "GIF"), "", "99 frames have 1425600 pixels"),
        (listed([frame(0, 900, 900)] * 32), FRAMES_TYPE, "900 x 900 pixels"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            prepare(data, media_type, pixels=300_000)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_times_of_an_animation_are_whole_milliseconds(form: str) -> None:
    """32 frames of 70 ms: each at index * 70 ms to the bit. Planted: the sum of their seconds misses a border."""
    data = saved([frame(7 * shade, 16, 16) for shade in range(32)], form, duration=70, lossless=True)
    times = [time for _, time in videos._animated(DecodeTask(kind="video"), data)]
    assert times == [70 * index / 1000 for index in range(32)]
    summed = [sum([0.07] * index, 0.0) for index in range(32)]
    assert times != summed


def test_listed_frames_share_the_pixels_that_are_decoded() -> None:
    """32 frames may have four images' pixels together: each of 300 x 300 is one too many, of 190 x 190 none is."""
    with pytest.raises(InvalidRequest, match="300 x 300 pixels"):
        prepare(listed([frame(0, 300, 300)] * 32), FRAMES_TYPE, pixels=300_000)
    assert prepare(listed([frame(0, 190, 190)] * 32), FRAMES_TYPE, pixels=300_000).runs == 32


@pytest.mark.parametrize(
    ("name", "end_ms", "rate"),
    [("matroska,webm", 1100, 24 / 1.1), ("matroska,webm", 1001, 24.0), ("mov,mp4", 1100, 24.0)],
)
def test_a_rate_that_times_belie_is_their_mean(name: str, end_ms: int, rate: float) -> None:
    """A tenth of a second in a second of a Matroska is no rounding; a millisecond is. An MP4's header is believed."""
    stream = SimpleNamespace(
        average_rate=24, time_base=Fraction(1, 1000), container=SimpleNamespace(format=SimpleNamespace(name=name))
    )
    times = [1000 * index // 24 for index in range(24)] + [end_ms]
    assert videos._rate(stream, times) == pytest.approx(rate)


class CountedDecoder:
    """A stream whose packets are decoded to themselves, in the order of their times, and counted."""

    def __init__(self) -> None:
        self.codec_context = self
        self.decoded: list[int] = []
        self.held: list[Any] = []

    def flush_buffers(self) -> None:
        self.held.clear()

    def decode(self, packet: Any) -> list[Any]:
        """The frames that come out: the last two are held, since a packet with an earlier time may follow."""
        if packet is not None:
            self.decoded.append(packet.pts)
            self.held.append(packet)
        self.held.sort(key=lambda held: held.pts)
        count = len(self.held) - (2 if packet is not None else 0)
        ready = self.held[: max(0, count)]
        del self.held[: len(ready)]
        return ready


@pytest.mark.parametrize("stored", [range(8), [0, 1, 2, 4, 3, 5, 7, 6]])
def test_decoding_begins_at_the_key_frame_before(stored: Sequence[int]) -> None:
    """Also of a frame that is shown before the key frame that it is stored after: the one before that, not the first of all."""
    packets = [SimpleNamespace(pts=pts, is_keyframe=(pts % 2 == 0 and pts > 0) or number == 0) for number, pts in enumerate(stored)]
    stream = CountedDecoder()
    chosen = [list(stored).index(3)]
    begins = videos._begins(cast("Any", packets), chosen)
    [shown] = videos._decoded(cast("Any", stream), cast("Any", packets), begins, chosen)
    assert shown.pts == 3
    assert stream.decoded[0] == 2


def test_each_packet_is_decoded_once() -> None:
    """For several frames that are shown after one key frame; decoding begins anew at the next one."""
    packets = [SimpleNamespace(pts=pts, is_keyframe=pts in (0, 8)) for pts in range(16)]
    stream, chosen = CountedDecoder(), [1, 3, 5, 9, 11]
    begins = videos._begins(cast("Any", packets), chosen)
    shown = videos._decoded(cast("Any", stream), cast("Any", packets), begins, chosen)
    assert [frame.pts for frame in shown] == chosen
    assert stream.decoded == [*range(8), *range(8, 14)]
    assert videos._count(begins, chosen) == 6 + 4


def test_the_decoder_holds_to_the_pixels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may lie: without its check the decoder itself refuses 192 x 192 pixels where 20 000 may be."""
    monkeypatch.setattr(videos, "check_pixels", lambda *_: None)
    data = film(moving(3, 192, 192), "libx264", "mp4")
    stream = videos.opened_stream
    monkeypatch.setattr(videos, "opened_stream", lambda data, kind, seconds, pixels: stream(data, kind, seconds, 1 << 24))
    assert len(list(videos._filmed(DecodeTask(kind="video", pixels=40_000), data))) == 3
    with pytest.raises((av.error.FFmpegError, InvalidRequest)):
        list(videos._filmed(DecodeTask(kind="video", pixels=20_000), data))


@pytest.mark.parametrize("most", [3 * 192 * 192, 3 * 192 * 192 - 1])
def test_the_frames_to_decode_are_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A film of three frames of 192 x 192 has its pixels at most; with one pixel less it is refused before any is decoded."""
    monkeypatch.setattr(videos, "FILMED_PIXELS", most)
    film_of_three = videos._filmed(DecodeTask(kind="video"), film(moving(3, 192, 192), "libx264", "mp4"))
    if most == 3 * 192 * 192:
        assert len(list(film_of_three)) == 3
        return
    monkeypatch.setattr(videos, "_decoded", lambda *_: pytest.fail("a frame was decoded"))
    with pytest.raises(InvalidRequest, match="110592 pixels of frames would have to be decoded"):
        list(film_of_three)


def test_frames_before_an_edits_begin_are_not_shown() -> None:
    """An MP4 whose edit list begins ten frames in has ten frames less, and its first is the eleventh."""
    data = film(moving(40), "libx264", "mp4", bf="0")
    whole = [np.asarray(image) for image, _ in videos._filmed(DecodeTask(kind="video"), data)]
    at = data.index(b"elst") + 16
    [begin] = struct.unpack(">i", data[at : at + 4])
    cut = data[:at] + struct.pack(">i", begin + 10 * 512) + data[at + 4 :]
    made = list(videos._filmed(DecodeTask(kind="video"), cut))
    assert (len(whole), len(made)) == (32, 30)
    expected = np.asarray(next(iter(videos._filmed(DecodeTask(kind="video"), film(moving(40)[10:], "libx264", "mp4", bf="0"))))[0])
    assert np.abs(np.asarray(made[0][0]).astype(int) - expected).mean() < 4 < np.abs(whole[0].astype(int) - expected).mean()
