"""Clips of 30 s a second of a rank's audio tower, all at once and one by one: `python -m tests.bench.clips`; JSON rows.

    check   the error of our bf16 rows, relative to transformers' own in bf16: both against transformers' in fp32
    rate    `batch` clips in the batches that a rank makes of them (`engine.memory.ENCODER_ROWS`); beside it the same one by one

With `--nano --device cpu` it runs anywhere, and times nothing that matters.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.audio_geometry import AudioGeometry, read_audio
from engine.rank.load.random_fill import dummy
from engine.rank.load.slices import pieces
from engine.rank.models.audio import AudioEncoder, AudioTower
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.rank.stages.encode_stage import batches
from tests.bench.encoders import compared, seconds, show
from tests.nano.model_shapes import PUBLIC, ModelShape, config
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.dummy_tensors import dummy_tensor


def encoder(shape: ModelShape, device: torch.device) -> AudioEncoder:
    """Of random weights, in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(shape, "bfloat16")))
        geometry = read_audio(Path(folder))
    assert geometry is not None
    model = (AudioEncoder if geometry.unified else AudioTower)(geometry, torch.bfloat16, device)
    dummy(model, ENCODER_TENSORS[AudioGeometry])
    return model


def theirs(shape: ModelShape, geometry: AudioGeometry, clips: list[Tensor], dtype: torch.dtype) -> Tensor:
    """transformers' rows, with the same weights."""
    from transformers import Gemma4Config
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel, Gemma4MultimodalEmbedder

    device, settings = clips[0].device, Gemma4Config(**config(shape, "bfloat16"))
    tower = Gemma4AudioModel(settings.audio_config).to(device).eval()
    embedder = Gemma4MultimodalEmbedder(settings.audio_config, settings.text_config).to(device)
    tensors = ENCODER_TENSORS[AudioGeometry]
    weights = {name: dummy_tensor(name, tensors, geometry, 0, device) for name in pieces(tensors, geometry)}
    embedder.load_state_dict({"embedding_projection.weight": weights.pop("model.embed_audio.embedding_projection.weight")})
    missing = tower.load_state_dict({name.removeprefix("model.audio_tower."): x for name, x in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith(("_min", "_max")) for name in missing.missing_keys), missing
    tower, embedder = tower.to(dtype), embedder.to(dtype)
    ones = [torch.ones(1, len(clip), dtype=torch.bool, device=device) for clip in clips]
    made = [tower(clip[None].to(dtype), mask).last_hidden_state[0] for clip, mask in zip(clips, ones, strict=True)]
    return embedder(inputs_embeds=torch.cat(made)).float()  # type: ignore[no-any-return]


def check(name: str, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """Root mean square errors, relative to the rows'; the bar of the ratio is 1.25."""
    clips = [torch.randn((frames, 128), device=device) for frames in (98, 2999, 13)]
    model = encoder(shape, device)
    exact = theirs(shape, model.geometry, clips, torch.float32)
    return compared(name, exact, model(clips), theirs(shape, model.geometry, clips, torch.bfloat16))


def rate(name: str, shape: ModelShape, count: int, device: torch.device) -> dict[str, Any]:
    """Clips a second, and seconds of sound a second."""
    model, clip = encoder(shape, device), torch.randn((2999, 128), device=device)
    together = seconds(lambda: [model(part) for part in batches(model, [clip] * count)], device)
    alone = seconds(lambda: model([clip]), device)
    return {"case": name, "batch": count, "clips/s": count / together, "one by one": 1 / alone, "times": alone * count / together}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.clips", description=__doc__)
    parser.add_argument("--members", nargs="+", default=["e2b"], choices=["e2b", "e4b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nano", action="store_true", help="nano shapes")
    args = parser.parse_args()
    device = torch.device(args.device)
    for name in args.members:
        shape = (SHAPES if args.nano else PUBLIC)[name]
        show([check(name, shape, device)])
        show(rate(name, shape, count, device) for count in args.batches)


if __name__ == "__main__":
    main()
