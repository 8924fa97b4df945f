"""Opens files for ffmpeg (PyAV) from their bytes, with a fixed list of demuxers and codecs.
Playlists are refused, and nothing that a file refers to is opened."""

import io
import re
from typing import Any, Literal

from av.container import open as open_container
from av.stream import Disposition

from engine.errors import InvalidRequest

STREAMS = 16
PROBED_BYTES = 1 << 18
_CODECS = {
    "video": ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1"),
    "audio": (
        *("mp3float", "flac", "opus", "vorbis", "aac", "alac", "pcm_alaw", "pcm_mulaw", "pcm_u8"),
        *(f"pcm_{kind}{end}" for kind in ("s16", "s24", "s32", "f32", "f64") for end in ("le", "be")),
    ),
}
_GUESSED = ("mp3", "aac")  # whose seconds are guessed from their first bits a second
_DEMUXERS = {
    "wav": rb"RIFF....WAVE",
    "mp3": rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]",
    "aac": rb"\xff[\xf0\xf1\xf8\xf9]",
    "flac": rb"fLaC",
    "ogg": rb"OggS",
    "matroska": rb"\x1aE\xdf\xa3",
    "mov": rb"....(ftyp|moov|mdat|wide|free|skip)",
}


def demuxer(data: bytes) -> str | None:
    """Decides by the bytes after an ID3 tag."""
    tag = re.match(rb"ID3...(....)", data, re.DOTALL)
    start = 0
    if tag:
        start = tag.end() + sum((byte & 127) << shift for byte, shift in zip(tag[1], (21, 14, 7, 0), strict=True))
    heads = [data[at : at + 16] for at in (start, 0)]
    return next((name for head in heads for name, magic in _DEMUXERS.items() if re.match(magic, head, re.DOTALL)), None)


def opened_stream(data: bytes, kind: Literal["audio", "video"], most_seconds: float, pixels: int = 1) -> Any:
    """The best stream, decoded by one thread. `pixels` bounds probing. InvalidRequest: unknown file
    or codec, no stream, or too long."""
    if (name := demuxer(data)) is None:
        raise InvalidRequest("it is not WAV, MP3, FLAC, Ogg, AAC, M4A, MP4 or WebM")
    codecs = ",".join(codec for names in _CODECS.values() for codec in names)
    options = {"codec_whitelist": codecs, "max_streams": str(STREAMS), "max_pixels": str(pixels), "probesize": str(PROBED_BYTES)}
    options |= {"format_whitelist": name, "protocol_whitelist": "none"}
    stream = open_container(io.BytesIO(data), "r", format=name, options=options).streams.best(kind)
    if stream is None or stream.disposition & Disposition.attached_pic:
        raise InvalidRequest(f"it holds no {kind}")
    if stream.codec_context:
        codec = stream.codec_context.name
    else:
        codec = "of a codec that is unknown"
    if codec not in _CODECS[kind]:
        raise InvalidRequest(f"its {kind} is {codec}; read are {', '.join(_CODECS[kind])}")
    if stream.duration and stream.time_base and name not in _GUESSED:
        check_seconds(float(stream.duration * stream.time_base), kind, most_seconds)
    stream.codec_context.thread_count = 1
    return stream


def check_seconds(seconds: float, kind: str, most: float) -> None:
    """InvalidRequest: too many."""
    if seconds > most:
        raise InvalidRequest(f"it has {seconds:.0f} s of {kind}; at most {most:g} are read")
