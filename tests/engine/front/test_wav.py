"""WAV files of every kind, resampling, and what is refused before it is decoded."""

import struct
import time
import tracemalloc

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.front.audio_features import RATE, Array
from engine.front.wav import read_wav, resampled

pytestmark = pytest.mark.pure

MOST = 60.0


def wav(samples: Array, bits: int = 16, rate: int = RATE, *, code: int = 1, extensible: bool = False) -> bytes:
    """A file of float samples [n] or [n, channels]."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    if code == 3:
        data = samples.astype("<f4" if bits == 32 else "<f8").tobytes()
    else:
        steps = np.round(samples.astype(np.float64) * 2 ** (bits - 1)).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype("<i4")
        data = (steps + 128).astype("u1").tobytes() if bits == 8 else steps.reshape(-1, 1).view("u1")[:, : bits // 8].tobytes()
    whole = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * whole, whole, bits)
    if extensible:
        form += struct.pack("<HHIH14s", 22, bits, 0, code, b"\0" * 14)
    chunks = [(b"LIST", b"odd"), (b"fmt ", form), (b"data", data)]
    body = b"".join(name + struct.pack("<I", len(each)) + each + b"\0" * (len(each) % 2) for name, each in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def tone(rate: int, hertz: float, seconds: float = 1.0) -> Array:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize(("bits", "code"), [(8, 1), (16, 1), (24, 1), (32, 1), (32, 3), (64, 3)])
@pytest.mark.parametrize("extensible", [False, True])
def test_every_kind_is_read(bits: int, code: int, extensible: bool) -> None:
    """Two channels come as their mean, to half a step of what the file can hold; a file of one channel more does not."""
    left, right = tone(RATE, 440), tone(RATE, 1000)
    step = 2.0 ** -min(23, bits - 1)
    read = read_wav(wav(np.stack([left, right], axis=1), bits, code=code, extensible=extensible), MOST, "file")
    assert np.abs(read - (left + right) / 2).max() <= step
    other = read_wav(wav(np.stack([left, right, right], axis=1), bits, code=code, extensible=extensible), MOST, "file")
    assert np.abs(other - (left + right) / 2).max() > 0.1


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_keeps_tones_and_makes_none(rate: int) -> None:
    """A tone that both rates hold comes out as if taken at 16 kHz, in time and length; one above 8 kHz leaves nothing."""
    inside = slice(RATE // 10, -RATE // 10)
    out = resampled(tone(rate, 1000), rate)
    assert len(out) == RATE
    assert np.abs(out - tone(RATE, 1000))[inside].max() < 1e-3
    assert np.abs(out - tone(RATE, 1001))[inside].max() > 0.1
    if rate > 2 * 9000:
        assert np.abs(resampled(tone(rate, 9000), rate))[inside].max() < 1e-3


def test_a_cut_file_gives_what_is_there() -> None:
    """A stream's header says 4 GB; half a sample at the end is left out."""
    whole = wav(tone(RATE, 440))
    at = whole.index(b"data") + 4
    read = read_wav(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 : at + 4 + 201], MOST, "file")
    assert len(read) == 100


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"ID3\x04" + bytes(64), "MP3"),
        (b"fLaC" + bytes(64), "FLAC"),
        (b"", "this is none"),
        (b"RIFF\0\0\0\0WAVE", "no format or no samples"),
        (wav(tone(RATE, 440), rate=999), "999 Hz is not supported"),
        (wav(tone(RATE, 440), 16, code=6), "format 6, 16 bits"),
        (wav(np.full(8, np.nan, np.float32), 32, code=3), "no numbers"),
    ],
)
def test_what_is_no_readable_wav_is_refused(file: bytes, why: str) -> None:
    """By name, with the client's key."""
    with pytest.raises(InvalidRequest, match=f"^file: .*{why}") as refused:
        read_wav(file, MOST, "file")
    assert refused.value.param == "file"


def test_two_hours_are_refused_before_they_are_decoded() -> None:
    """In a blink and without memory; what is within the limit is read."""
    long = wav(np.zeros(2 * 3600 * 1000, np.float32), 8, rate=1000)
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(InvalidRequest, match="7200 s of audio exceed the limit of 60 s"):
        read_wav(long, MOST, "file")
    assert time.perf_counter() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(read_wav(long[: 60 * 1000], MOST, "file")) > 59 * RATE
