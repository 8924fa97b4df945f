"""Audio towers and the 12B's rows against transformers', clip by clip and all at once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.audio_geometry import AudioGeometry, read_audio
from engine.rank.models import audio
from engine.rank.models.audio import AudioEncoder, AudioTower, Before
from engine.rank.models.clipped import load_encoder
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from tests.conftest import Nano
from tests.support.judge.oracle import error, load_oracle

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5  # fp32, relative to the largest value
FAULT = 100 * TOLERANCE
FRAMES = (98, 1, 2999, 13, 48, 49, 96)  # 1 s and 30 s; to the edges of transformers' chunks of 12 rows, and a row beyond
Both = Callable[[str], tuple[AudioEncoder, Any]]


def clips(geometry: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, geometry.features, generator=generator) for count in FRAMES]


def encoder(folder: Path) -> AudioEncoder:
    geometry = read_audio(folder)
    assert geometry is not None
    model = (AudioEncoder if geometry.unified else AudioTower)(geometry, torch.float32, torch.device("cpu"))
    load_encoder(model, ENCODER_TENSORS[AudioGeometry], folder)
    return model


def theirs(oracle: Any, batch: list[Tensor]) -> Tensor:
    """transformers' soft tokens of clips, padded to one length."""
    padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(clip) for clip in batch])[:, None]
    with torch.no_grad():
        made = oracle.model.get_audio_features(padded, mask)
    return made.pooler_output[made.attention_mask]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def both(nano: Nano) -> Both:
    return cache(lambda member: (encoder(nano(member)), load_oracle(nano(member))))


@torch.inference_mode()
@pytest.mark.parametrize("member", ["e2b", "12b"])
def test_soft_tokens_are_transformers(both: Both, member: str) -> None:
    """A ragged batch has the rows that transformers gives, padded or clip by clip; in another order it has not."""
    model, oracle = both(member)
    batch = clips(model.geometry)
    right = theirs(oracle, batch)
    assert len(right) == sum(map(model.geometry.tokens, FRAMES))
    assert error(model(batch), right) < TOLERANCE
    assert error(torch.cat([theirs(oracle, [clip]) for clip in batch]), right) < TOLERANCE
    assert error(model([*batch[1:], batch[0]]), right) > FAULT


@torch.inference_mode()
def test_a_clip_is_encoded_alike_alone_and_among_others(both: Both) -> None:
    """1 s beside 30 s has the rows that it has alone; seeing rows of the clip before it would show."""
    model, _ = both("e2b")
    batch = clips(model.geometry)
    assert error(model(batch), torch.cat([model([clip]) for clip in batch])) < TOLERANCE
    merged = torch.cat([model.subsample([clip]) for clip in batch])
    apart, lengths = Before.of([model.geometry.tokens(count) for count in FRAMES], 12, model.device), [len(merged)]
    block = model.blocks[0]
    seen = block(merged, model._distances, apart)
    assert error(block(merged, model._distances, Before.of(lengths, 12, model.device)), seen) > FAULT


@torch.inference_mode()
@pytest.mark.parametrize("fault", ["reach", "distances", "bounds", "kernel"])
def test_faults_of_a_layer_show(both: Both, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over a row more, distances off by one, products without bounds, a convolution read backwards: each is far off."""
    model, oracle = both("e2b")
    batch = clips(model.geometry)[:1]
    right = theirs(oracle, batch)
    assert isinstance(model, AudioTower)
    if fault == "reach":
        before = Before.of
        monkeypatch.setattr(Before, "of", lambda lengths, count, device: before(lengths, count + 1, device))
        monkeypatch.setattr(model, "_distances", torch.cat([model._distances, model._distances[-1:]]))
    elif fault == "distances":
        monkeypatch.setattr(model, "_distances", model._distances.roll(1, 0))
    elif fault == "bounds":
        monkeypatch.setattr(audio.ClippedProduct, "forward", lambda self, x: functional.linear(x, self.weight.weight))
    else:
        for block in model.blocks:
            monkeypatch.setitem(vars(block.convolution), "depthwise", block.convolution.depthwise.flip(2))
    assert error(model(batch), right) > FAULT


def test_what_is_not_there_is_none(nano: Nano) -> None:
    """The large members have no audio encoder."""
    assert read_audio(nano("31b")) is None


@torch.inference_mode()
def test_a_clip_that_is_not_finite_harms_no_other(both: Both) -> None:
    """What stands behind it in a batch has the rows that it has alone."""
    model, _ = both("e2b")
    clip = clips(model.geometry)[0]
    made = model([torch.full_like(clip, torch.nan), clip])[-model.rows(clip) :]
    assert error(made, model([clip])) < TOLERANCE
