"""A clip's samples as encoder input: log-mel frames for E2B and E4B, raw rows for the 12B. Equal to
transformers' Gemma4AudioFeatureExtractor and Gemma4UnifiedAudioFeatureExtractor without masked
frames."""

from functools import cache

import numpy as np
import numpy.typing as npt

from engine.audio_geometry import MELS

Array = npt.NDArray[np.float32]

RATE = 16_000
CLIP_SAMPLES = 30 * RATE  # the most that the tower was trained on
_FRAME = 320
_HOP = 160
_FFT = 512
_WINDOW = np.hanning(_FRAME + 1)[:-1].astype(np.float32)  # Hann's, periodic
_CUT_SAMPLES, _QUIET = 10 * RATE, RATE // 10  # a cut is in a clip's last 10 s, in the middle of their quietest 0.1 s


def log_mels(samples: Array) -> Array:
    """samples [n] -> [(n - 1) // 160, 128]; empty for 160 samples or fewer."""
    padded = np.concatenate([np.zeros(_HOP, samples.dtype), samples])
    count = max(0, (len(samples) - 1) // _HOP)
    if not count:
        return np.zeros((0, MELS), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][:count]
    magnitudes = np.abs(np.fft.rfft(frames * _WINDOW, n=_FFT))
    return np.log(magnitudes @ _mel_filters() + 1e-3).astype(np.float32)


def raw_rows(samples: Array, size: int) -> Array:
    """samples [n] -> [ceil(n / size), size], zero-padded: a soft token each."""
    return np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)


def cut_at_silences(samples: Array) -> list[Array]:
    """Clips of at most 30 s, cut at the quietest points."""
    clips = []
    while len(samples) > CLIP_SAMPLES:
        first = CLIP_SAMPLES - _CUT_SAMPLES
        energy = np.cumsum(np.pad(np.square(samples[first:CLIP_SAMPLES], dtype=np.float64), (1, 0)))
        cut = first + int(np.argmin(energy[_QUIET:] - energy[:-_QUIET])) + _QUIET // 2
        clips.append(samples[:cut])
        samples = samples[cut:]
    return [*clips, samples]


@cache
def _mel_filters() -> npt.NDArray[np.float64]:
    """[257, 128]: triangles of height 1 between neighbours on the HTK scale."""
    mels = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    slopes = edges - np.linspace(0, RATE // 2, _FFT // 2 + 1)[:, None]
    widths = np.diff(edges)
    return np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
