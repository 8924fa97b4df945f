"""Log-mels, rows and counts against transformers' feature extractors and processors; cuts at silences."""

import numpy as np
import pytest
from transformers import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from deploy.edge.media import audio_features as af
from engine.audio_geometry import read_audio
from tests.conftest import Nano

pytestmark = pytest.mark.cpu

LENGTHS = (161, 320, 321, 480_000, 480_001)
TOLERANCE = 1e-4  # fp32; rfft of float32 is complex128 in NumPy 1


def noise(samples: int) -> af.Array:
    return 0.1 * np.random.default_rng(samples).standard_normal(samples).astype(np.float32)


def judged(samples: af.Array) -> af.Array:
    """transformers' frames that it calls valid."""
    made = Gemma4AudioFeatureExtractor()([samples], truncation=False, max_length=None, return_tensors="np")
    return made["input_features"][0][made["input_features_mask"][0]]


@pytest.mark.parametrize("samples", LENGTHS)
def test_log_mels_equal_those_of_transformers(samples: int) -> None:
    """As many frames, equal values; a window that begins a sample late does not pass."""
    clip = noise(samples)
    assert af.log_mels(clip).shape == (frames := judged(clip)).shape
    assert np.abs(af.log_mels(clip) - frames).max() < TOLERANCE
    late = af.log_mels(np.append(clip[1:], np.float32(0)))
    assert np.abs(late - frames).max() > 100 * TOLERANCE


@pytest.mark.parametrize("samples", [0, 160, 161])
def test_a_short_clip_has_no_frame(samples: int) -> None:
    """Of more than a hop of 160 samples it has one."""
    assert af.log_mels(np.zeros(samples, np.float32)).shape == (samples // 161, af.MELS)


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


@pytest.mark.parametrize("begin", [21 * af.RATE, 25 * af.RATE + 7, 29 * af.RATE])
def test_a_cut_is_in_the_middle_of_the_quietest_tenth(begin: int) -> None:
    """To the sample: half of a silence belongs to each side. A cut at the silence's begin would be 800 samples off."""
    samples = noise(31 * af.RATE)
    samples[begin : begin + af.RATE // 10] = 0
    assert len(af.cut_at_silences(samples)[0]) == begin + af.RATE // 20
