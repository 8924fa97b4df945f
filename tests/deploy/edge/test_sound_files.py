"""Sound files of every kind: mixed to one channel at 16 kHz, and what is refused before, or while, it is decoded."""


import numpy as np
import pytest

from deploy.edge.media.audio_features import RATE
from deploy.edge.media.clips import read_audio
from deploy.edge.media.containers import demuxer
from engine.errors import InvalidRequest
from tests.support.media_files import sound
from tests.support.wav_files import tone, wav

pytestmark = pytest.mark.pure

MOST = 60.0


@pytest.mark.parametrize(("bits", "code"), [(8, 1), (16, 1), (24, 1), (32, 1), (32, 3), (64, 3)])
@pytest.mark.parametrize("extensible", [False, True])
def test_every_wav_is_read(bits: int, code: int, extensible: bool) -> None:
    """Two channels come as their mean, to half a step of what the file can hold; a file of one channel more does not."""
    left, right = tone(RATE, 440), tone(RATE, 1000)
    step = 2.0 ** -min(23, bits - 1)
    read = read_audio(wav(np.stack([left, right], axis=1), bits, code=code, extensible=extensible), MOST)
    assert np.abs(read - (left + right) / 2).max() <= step
    other = read_audio(wav(np.stack([left, right, right], axis=1), bits, code=code, extensible=extensible), MOST)
    assert np.abs(other - (left + right) / 2).max() > 0.1


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize(("codec", "form"), [("flac", "flac"), ("alac", "ipod"), ("flac", "ogg")])
def test_what_loses_nothing_is_the_wav(codec: str, form: str, rate: int) -> None:
    """The same bits at 16 kHz as from a WAV of those samples; of a sample that differs by one, others."""
    samples = np.random.default_rng(0).integers(-999, 999, 2 * rate).astype(np.float32) / 2**15
    expected = read_audio(wav(samples, rate=rate), MOST)
    assert np.array_equal(read_audio(sound(samples, codec, form, rate), MOST), expected)
    samples[rate] += 1 / 2**15
    assert not np.array_equal(read_audio(sound(samples, codec, form, rate), MOST), expected)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_keeps_tones_and_makes_none(rate: int) -> None:
    """A tone that both rates hold comes out as if taken at 16 kHz, in time and length; one above 8 kHz leaves nothing."""
    inside = slice(RATE // 10, -RATE // 10)
    out = read_audio(wav(tone(rate, 1000, 30.0), 32, code=3, rate=rate), MOST)
    assert len(out) == 30 * RATE
    assert np.abs(out - tone(RATE, 1000, 30.0))[inside].max() < 1e-3
    assert np.abs(out - tone(RATE, 1001, 30.0))[inside].max() > 0.1
    if rate > 2 * 9000:
        assert np.abs(read_audio(wav(tone(rate, 9000), 32, code=3, rate=rate), MOST))[inside].max() < 1e-3


@pytest.mark.parametrize(
    ("codec", "form", "rate"),
    [("libmp3lame", "mp3", 44_100), ("aac", "ipod", 44_100), ("aac", "adts", 44_100), ("libopus", "ogg", 48_000),
     ("libopus", "webm", 48_000), ("aac", "mp4", 48_000)],
)  # fmt: skip
def test_what_is_coded_sounds_alike(codec: str, form: str, rate: int) -> None:
    """A tone of 2 s keeps its length, its height and nearly its strength; another tone is another."""
    read = read_audio(sound(tone(rate, 440, 2.0), codec, form, rate), MOST)
    assert abs(len(read) - 2 * RATE) < RATE / 10
    spectrum = np.abs(np.fft.rfft(read[RATE // 2 : 3 * RATE // 2]))
    assert np.argmax(spectrum) == 440
    assert spectrum[440] == pytest.approx(0.25 * RATE, rel=0.05)


@pytest.mark.parametrize(("codec", "form"), [("libmp3lame", "mp3"), ("aac", "adts"), ("flac", "flac")])
def test_a_tag_in_front_changes_nothing(codec: str, form: str) -> None:
    """An ID3 tag of 276 bytes, whose size has 7 bits a byte, before a file of any kind. Planted: a size of 8 bits a byte."""
    samples = np.random.default_rng(0).integers(-999, 999, RATE).astype(np.float32) / 2**15
    file, tag = sound(samples, codec, form), b"ID3\x04\0\0\0\0\x02\x14" + bytes(276)
    assert demuxer(tag + file) == demuxer(file)
    assert demuxer(tag + bytes(256) + file) != demuxer(file) or form == "mp3"
    assert np.array_equal(read_audio(tag + file, MOST), read_audio(file, MOST))


def test_a_cut_file_gives_what_is_there() -> None:
    """A stream's header says 4 GB; half a sample at the end is left out."""
    whole = wav(tone(RATE, 440))
    at = whole.index(b"data") + 4
    read = read_audio(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 : at + 4 + 201], MOST)
    assert len(read) == 100


@pytest.mark.parametrize("tail", [bytes(4096), b"LYRICSBEGIN" + b"hello " * 300])
def test_what_follows_an_mp3_is_left_out(tail: bytes) -> None:
    """Padding and lyrics are no sound, and no error."""
    file = sound(tone(44_100, 440), "libmp3lame", "mp3", 44_100)
    assert abs(len(read_audio(file + tail, MOST)) - len(read_audio(file, MOST))) < RATE / 10


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "not WAV, MP3"),
        (b"#EXTM3U\nhttp://127.0.0.1/", "not WAV, MP3"),
        (wav(tone(RATE, 440), rate=999), "999 Hz"),
        (wav(np.full(8, np.nan, np.float32), 32, code=3), "no numbers"),
        (wav(np.full(800, 3e38, np.float32), 32, code=3), "no numbers"),
        (sound(tone(32_000, 440), "ac3", "mp4", 32_000), "its audio is ac3; read are mp3float, flac"),
    ],
)
def test_what_is_not_read_is_refused(file: bytes, why: str) -> None:
    """With what is wrong with it."""
    with pytest.raises(InvalidRequest, match=why):
        read_audio(file, MOST)
