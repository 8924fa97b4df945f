"""A sound file as encoder input; for a tower, clips of at most 30 s."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from av import AudioFrame, AudioResampler
from av.error import InvalidDataError

from deploy.edge.media.audio_features import RATE, Array, cut_at_silences, log_mels, raw_rows
from deploy.edge.media.containers import check_seconds, opened_stream
from deploy.edge.media.rasters import prepared
from deploy.edge.media.tasks import DecodeTask, Prepared
from engine.audio_geometry import tower_tokens
from engine.errors import InvalidRequest

_LOUDEST = 1e9  # beyond it features may not be finite
_RATES = range(1000, 384_001)


def prepare_audio(task: DecodeTask, data: bytes) -> Prepared:
    """InvalidRequest: unreadable."""
    samples = read_audio(data, task.audio_seconds)
    if task.row_samples:
        clips = [raw_rows(samples, task.row_samples)]
        tokens = [len(clips[0])]
    else:
        clips = [log_mels(clip) for clip in cut_at_silences(samples)]
        tokens = [tower_tokens(len(clip)) for clip in clips]
    if not all(tokens):
        raise InvalidRequest(f"it has {len(samples)} samples at 16 kHz, which are too few")
    text = "".join(f"<|audio>{'<|audio|>' * count}<audio|>" for count in tokens)
    return prepared("audio", np.concatenate(clips), text, len(clips), tuple(map(len, clips)))


def read_audio(data: bytes, most_seconds: float) -> Array:
    """Samples float32 [n], mono at 16 kHz. InvalidRequest: unknown format, or too long."""
    stream = opened_stream(data, "audio", most_seconds)
    if stream.rate not in _RATES:
        raise InvalidRequest(f"audio at {stream.rate} Hz is not read")
    return np.concatenate([np.zeros(0, np.float32), *_mono(stream, most_seconds)])


def _frames(stream: Any) -> Iterator[AudioFrame]:
    """Skip damaged packets, as players do: many an MP3 ends in something else."""
    for packet in stream.container.demux(stream):
        with suppress(InvalidDataError):
            yield from packet.decode()


def _mono(stream: Any, most_seconds: float) -> Iterator[Array]:
    resampler = AudioResampler("fltp", rate=RATE)
    samples = 0
    for frame in chain(_frames(stream), [None]):  # at last what the resampler holds
        samples += frame.samples if frame else 0
        check_seconds(samples / stream.rate, "audio", most_seconds)
        for part in resampler.resample(frame):
            mono = part.to_ndarray().mean(axis=0, dtype=np.float32)
            if not (np.abs(mono) < _LOUDEST).all():
                raise InvalidRequest("it has samples that are no numbers")
            yield mono
