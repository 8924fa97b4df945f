"""WAV files, PCM of 8 to 32 bits or floats: mixed to one channel, resampled to 16 kHz, bounded before anything is decoded."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import InvalidRequest
from engine.front.audio_features import RATE, Array

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_RATES, _CHANNELS = range(1000, 384_001), range(1, 33)
_FORMATS = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 24): "u1", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8"}
_OTHERS = {b"ID3": "MP3", b"\xff\xfb": "MP3", b"fLaC": "FLAC", b"OggS": "Ogg", b"\x1aE\xdf\xa3": "WebM"}


@dataclass(frozen=True)
class _Wav:
    """What a file's header says; `data`: its samples, as they are stored."""

    code: int
    bits: int
    channels: int
    rate: int
    data: memoryview


def read_wav(file: bytes, most_seconds: float) -> Array:
    """Its samples, float32 [n], mono at 16 kHz. InvalidRequest: it is no WAV file, or longer than that."""
    wav = _header(file)
    if (seconds := len(wav.data) / (wav.channels * wav.bits // 8 * wav.rate)) > most_seconds:
        raise InvalidRequest(f"it has {seconds:.0f} s of audio; at most {most_seconds:g} are read")
    mono: Array = _decoded(wav)
    if wav.channels > 1:
        mono = mono.reshape(-1, wav.channels).mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise InvalidRequest("it has samples that are no numbers")
    return resampled(mono, wav.rate)


def resampled(samples: Array, rate: int) -> Array:
    """Samples at `rate` -> at 16 kHz, as many as begin before their end: what both rates can hold of the spectrum is kept.

    In blocks of 14 s, each with a second on either side, where what a transform makes of its ends fades away.
    """
    if rate == RATE:
        return samples
    padded, blocks = np.pad(samples, (rate, 16 * rate)), []
    for first in range(0, len(samples), 14 * rate):
        spectrum = np.fft.rfft(padded[first : first + 16 * rate])
        blocks.append(np.fft.irfft(spectrum[: 8 * RATE + 1], 16 * RATE)[RATE:-RATE].astype(np.float32))
    whole = np.concatenate(blocks)[: -(-len(samples) * RATE // rate)]
    whole *= RATE / rate
    return whole


def _header(file: bytes) -> _Wav:
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        known = next((f" but {name}" for magic, name in _OTHERS.items() if file.startswith(magic)), "")
        raise InvalidRequest(f"it is no WAV file{known}; nothing else is read")
    form: tuple[int, int, int, int] | None = None
    for name, chunk in _chunks(memoryview(file)[12:]):
        if name == b"fmt " and len(chunk) >= 16:
            code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
            if code == _EXTENSIBLE and len(chunk) >= 26:
                (code,) = struct.unpack_from("<H", chunk, 24)
            form = code, bits, channels, rate
        if name == b"data" and form is not None:
            code, bits, channels, rate = form
            if (code, bits) not in _FORMATS or channels not in _CHANNELS or rate not in _RATES:
                raise InvalidRequest(f"a WAV file of format {code}, {bits} bits, {channels} channels, {rate} Hz is not read")
            frame = bits // 8 * channels
            return _Wav(code, bits, channels, rate, chunk[: len(chunk) // frame * frame])
    raise InvalidRequest("the WAV file has no format or no samples")


def _chunks(rest: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Names and contents, in order; the last may be cut, as a stream's that did not know its length."""
    while len(rest) >= 8:
        name, size = struct.unpack_from("<4sI", rest)
        yield name, rest[8 : 8 + size]
        rest = rest[8 + size + size % 2 :]


def _decoded(wav: _Wav) -> Array:
    """In [-1, 1)."""
    raw = np.frombuffer(wav.data, _FORMATS[wav.code, wav.bits])
    if wav.bits == 24:
        shifted = np.zeros((len(raw) // 3, 4), np.uint8)
        shifted[:, 1:] = raw.reshape(-1, 3)
        raw = shifted.view("<i4")[:, 0]
    samples = raw.astype(np.float32)
    if wav.code == _PCM:  # in place: a file may be large
        half = {8: 1 << 7, 16: 1 << 15}.get(wav.bits, 1 << 31)
        samples -= half if wav.bits == 8 else 0
        samples /= half
    return samples
