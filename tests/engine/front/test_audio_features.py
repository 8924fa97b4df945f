"""Log-mels, rows and counts against transformers' feature extractors and processors; cuts at silences."""

import numpy as np
import pytest
from transformers import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from engine.audio_geometry import read_audio
from engine.front import audio_features as af
from tests.conftest import Nano
from tests.support.wav_files import tone

pytestmark = pytest.mark.cpu

LENGTHS = (161, 320, 321, 480_000, 480_001)
TOLERANCE = 1e-4  # fp32; rfft of float32 is complex128 in NumPy 1


def noise(samples: int) -> af.Array:
    return 0.1 * np.random.default_rng(samples).standard_normal(samples).astype(np.float32)


def judged(samples: af.Array) -> af.Array:
    """transformers' frames that it calls valid."""
    made = Gemma4AudioFeatureExtractor()([samples], truncation=False, max_length=None, return_tensors="np")
    frames: af.Array = made["input_features"][0][made["input_features_mask"][0]]
    return frames


@pytest.mark.parametrize("samples", LENGTHS)
def test_log_mels_equal_those_of_transformers(samples: int) -> None:
    """As many frames, equal values; a window that begins a sample late does not pass."""
    clip = noise(samples)
    assert af.log_mels(clip).shape == (frames := judged(clip)).shape
    assert np.abs(af.log_mels(clip) - frames).max() < TOLERANCE
    late = af.log_mels(np.append(clip[1:], np.float32(0)))
    assert np.abs(late - frames).max() > 100 * TOLERANCE


def test_counts_equal_those_of_the_processor(nano: Nano) -> None:
    """Soft tokens at all lengths around their steps."""
    processor = object.__new__(Gemma4Processor)
    vars(processor).update(audio_seq_length=750, feature_extractor=Gemma4AudioFeatureExtractor())
    tower = read_audio(nano("e2b"))
    assert tower is not None
    for samples in (*range(161, 2600, 13), 160_000, 479_999, 480_000):
        expected = processor._compute_audio_num_tokens(np.zeros(samples), af.RATE)
        assert tower.tokens(len(af.log_mels(np.zeros(samples, np.float32)))) == expected, samples


@pytest.mark.parametrize("samples", [1, 640, 641, 480_001])
def test_rows_equal_those_of_the_unified_extractor(samples: int) -> None:
    """Bit for bit."""
    clip = noise(samples)
    made = Gemma4UnifiedAudioFeatureExtractor()(clip, return_tensors="np")
    assert np.array_equal(af.raw_rows(clip, 640), made["input_features"][0])


def test_long_clips_are_cut_where_they_are_quiet() -> None:
    """Pieces make up the whole, none is longer than 30 s, and cuts are in the silences that are there."""
    samples = noise(75 * af.RATE)
    for second in (24, 51):
        samples[second * af.RATE : second * af.RATE + af.RATE // 2] *= 1e-3
    clips = af.cut_at_silences(samples)
    assert np.array_equal(np.concatenate(clips), samples)
    assert max(map(len, clips)) <= af.CLIP_SAMPLES
    ends = np.cumsum([len(clip) for clip in clips])[:-1] / af.RATE
    assert [int(2 * end) for end in ends] == [2 * 24, 2 * 51]
    assert [len(clip) for clip in af.cut_at_silences(samples[: af.CLIP_SAMPLES])] == [af.CLIP_SAMPLES]


def test_a_clip_a_little_too_long_leaves_no_crumb() -> None:
    """What is left behind a cut has frames of its own."""
    assert min(len(af.log_mels(clip)) for clip in af.cut_at_silences(np.zeros(af.CLIP_SAMPLES + 1, np.float32))) > 0


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_keeps_tones_and_makes_none(rate: int) -> None:
    """A tone that both rates hold comes out as if taken at 16 kHz, in time and length; one above 8 kHz leaves nothing. It goes on
    over the edges of blocks, and how it is cut into parts changes no bit."""
    inside = slice(af.RATE // 10, -af.RATE // 10)
    sound = tone(rate, 1000, 30.0)
    out = af.resampled([sound], rate)
    assert len(out) == 30 * af.RATE
    assert np.abs(out - tone(af.RATE, 1000, 30.0))[inside].max() < 1e-3
    assert np.abs(out - tone(af.RATE, 1001, 30.0))[inside].max() > 0.1
    if rate > 2 * 9000:
        assert np.abs(af.resampled([tone(rate, 9000)], rate))[inside].max() < 1e-3
    assert np.array_equal(af.resampled(np.split(sound, [7, 7, rate, 15 * rate]), rate), out)
