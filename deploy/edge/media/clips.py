"""A WAV file as an audio encoder takes it. For a tower, what is longer than 30 s becomes several clips, cut at silences."""

import msgspec
import numpy as np

from deploy.edge.media.rasters import prepared
from deploy.edge.media.tasks import DecodeTask, Prepared
from engine.audio_geometry import tower_tokens
from engine.errors import InvalidRequest
from engine.front.audio_features import cut_at_silences, log_mels, raw_rows
from engine.front.wav import read_wav


def prepare_audio(task: DecodeTask, data: bytes) -> Prepared:
    """InvalidRequest."""
    samples = read_wav(data, task.seconds)
    if task.row_samples:
        clips = [raw_rows(samples, task.row_samples)]
        tokens = [len(clips[0])]
    else:
        clips = [log_mels(clip) for clip in cut_at_silences(samples)]
        tokens = [tower_tokens(len(clip)) for clip in clips]
    if not all(tokens):
        raise InvalidRequest(f"it has {len(samples)} samples at 16 kHz, which are too few")
    text = "".join(f"<|audio>{'<|audio|>' * count}<audio|>" for count in tokens)
    whole = prepared("audio", np.concatenate(clips), text, runs=len(clips))
    return msgspec.structs.replace(whole, clips=tuple(map(len, clips)))
