"""WAV files of every kind, resampling, and what is refused before it is decoded."""

import time
import tracemalloc

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.front.audio_features import RATE
from engine.front.wav import read_wav, resampled
from tests.support.wav_files import tone, wav

pytestmark = pytest.mark.pure

MOST = 60.0


@pytest.mark.parametrize(("bits", "code"), [(8, 1), (16, 1), (24, 1), (32, 1), (32, 3), (64, 3)])
@pytest.mark.parametrize("extensible", [False, True])
def test_every_kind_is_read(bits: int, code: int, extensible: bool) -> None:
    """Two channels come as their mean, to half a step of what the file can hold; a file of one channel more does not."""
    left, right = tone(RATE, 440), tone(RATE, 1000)
    step = 2.0 ** -min(23, bits - 1)
    read = read_wav(wav(np.stack([left, right], axis=1), bits, code=code, extensible=extensible), MOST)
    assert np.abs(read - (left + right) / 2).max() <= step
    other = read_wav(wav(np.stack([left, right, right], axis=1), bits, code=code, extensible=extensible), MOST)
    assert np.abs(other - (left + right) / 2).max() > 0.1


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_keeps_tones_and_makes_none(rate: int) -> None:
    """A tone that both rates hold comes out as if taken at 16 kHz, in time and length; one above 8 kHz leaves nothing. It goes on
    over the edges of blocks."""
    inside = slice(RATE // 10, -RATE // 10)
    out = resampled(tone(rate, 1000, 30.0), rate)
    assert len(out) == 30 * RATE
    assert np.abs(out - tone(RATE, 1000, 30.0))[inside].max() < 1e-3
    assert np.abs(out - tone(RATE, 1001, 30.0))[inside].max() > 0.1
    if rate > 2 * 9000:
        assert np.abs(resampled(tone(rate, 9000), rate))[inside].max() < 1e-3


def test_a_cut_file_gives_what_is_there() -> None:
    """A stream's header says 4 GB; half a sample at the end is left out."""
    whole = wav(tone(RATE, 440))
    at = whole.index(b"data") + 4
    read = read_wav(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 : at + 4 + 201], MOST)
    assert len(read) == 100


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"ID3\x04" + bytes(64), "no WAV file but MP3"),
        (b"fLaC" + bytes(64), "no WAV file but FLAC"),
        (b"", "no WAV file;"),
        (b"RIFF\0\0\0\0WAVE", "no format or no samples"),
        (wav(tone(RATE, 440), rate=999), "999 Hz is not read"),
        (wav(tone(RATE, 440), 16, code=6), "format 6, 16 bits"),
        (wav(np.full(8, np.nan, np.float32), 32, code=3), "no numbers"),
    ],
)
def test_what_is_no_readable_wav_is_refused(file: bytes, why: str) -> None:
    """With what is wrong with it."""
    with pytest.raises(InvalidRequest, match=why):
        read_wav(file, MOST)


def test_two_hours_are_refused_before_they_are_decoded() -> None:
    """In a blink and without memory; what is within the limit is read."""
    long = wav(np.zeros(2 * 3600 * 1000, np.float32), 8, rate=1000)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="7200 s of audio; at most 60 are read"):
        read_wav(long, MOST)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(read_wav(long[: 60 * 1000], MOST)) > 59 * RATE
