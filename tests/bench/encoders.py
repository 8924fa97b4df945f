"""Pictures, or clips, a second of a rank's encoder, all at once and one by one: `python -m tests.bench.encoders`; JSON rows.

    check   the error of our bf16 rows, relative to transformers' own in bf16: both against transformers' in fp32
    rate    pictures of one size, `batch` of them in the batches that a rank makes of them (`engine.memory.ENCODER_ROWS`); beside it
            the same one by one, and the products' share of what one large matrix product reaches here

--clips: of 30 s, by the audio tower. With `--nano --device cpu` it runs anywhere, and times nothing that matters.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.audio_geometry import AudioGeometry, read_audio
from engine.memory import ENCODER_ROWS
from engine.rank.load.random_fill import dummy
from engine.rank.load.slices import pieces
from engine.rank.models.audio import AudioEncoder, AudioTower
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.rank.models.vision import Tower, VisionEmbedder
from engine.rank.stages.encode_stage import batches
from engine.vision_geometry import CELL, VisionGeometry, read_vision
from tests.nano.model_shapes import PUBLIC, ModelShape, config
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.dummy_tensors import dummy_tensor
from tests.support.judge.pictures import padded, pictures

SIZES = {"480x480": (16, 16), "720p": (12, 22), "1120 tokens": (25, 44)}  # rows and columns of cells
FRAMES = 2999  # of a clip of 30 s
REPEATS = 3


def encoder(shape: ModelShape, dtype: torch.dtype, device: torch.device, *, clips: bool = False) -> Any:
    """Of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(shape, "bfloat16")))
        geometry: Any = (read_audio if clips else read_vision)(Path(folder))
    assert geometry is not None
    kinds = (AudioTower, AudioEncoder) if clips else (Tower, VisionEmbedder)
    model = kinds[geometry.unified](geometry, dtype, device)
    dummy(model, tensors(clips))
    return model


def tensors(clips: bool) -> Any:
    """The table of an encoder's tensors."""
    return ENCODER_TENSORS[AudioGeometry if clips else VisionGeometry]


class Theirs:
    """transformers' tower with the same weights."""

    def __init__(self, shape: ModelShape, geometry: Any, device: torch.device, *, clips: bool) -> None:
        from transformers import Gemma4Config
        from transformers.models.gemma4 import modeling_gemma4 as gemma4

        self.config = Gemma4Config(**config(shape, "bfloat16"))
        kind, own = ("audio", self.config.audio_config) if clips else ("vision", self.config.vision_config)
        self.tower = (gemma4.Gemma4AudioModel if clips else gemma4.Gemma4VisionModel)(own).to(device).eval()
        self.embedder = gemma4.Gemma4MultimodalEmbedder(own, self.config.text_config).to(device)
        weights = {name: dummy_tensor(name, tensors(clips), geometry, 0, device) for name in pieces(tensors(clips), geometry)}
        projection = "embedding_projection.weight"
        self.embedder.load_state_dict({projection: weights.pop(f"model.embed_{kind}.{projection}")})
        own_names = {name.removeprefix(f"model.{kind}_tower."): x for name, x in weights.items()}
        missing = self.tower.load_state_dict(own_names, strict=False)
        assert not missing.unexpected_keys
        assert all(name.endswith(("_min", "_max")) for name in missing.missing_keys), missing

    def rows(self, batch: list[Tensor], dtype: torch.dtype) -> Tensor:
        self.tower, self.embedder = self.tower.to(dtype), self.embedder.to(dtype)
        made = [self.embedder(inputs_embeds=(self.heard if one.dim() == 2 else self.seen)(one, dtype)) for one in batch]
        return torch.cat([rows.flatten(0, -2) for rows in made]).float()

    def heard(self, clip: Tensor, dtype: torch.dtype) -> Tensor:
        mask = torch.ones(1, len(clip), dtype=torch.bool, device=clip.device)
        return self.tower(clip[None].to(dtype), mask).last_hidden_state[0]  # type: ignore[no-any-return]

    def seen(self, picture: Tensor, _: torch.dtype) -> Tensor:
        pixels, places = padded(self, [picture.cpu()], picture.shape[0] * picture.shape[1] // 2304)
        given = {"pixel_values": pixels.to(picture.device), "pixel_position_ids": places.to(picture.device)}
        return self.tower(**given).last_hidden_state  # type: ignore[no-any-return]


def check(name: str, shape: ModelShape, device: torch.device, *, clips: bool) -> dict[str, Any]:
    """Root mean square errors, relative to the rows'; the bar of the ratio is 1.25."""
    batch = [torch.randn((frames, 128)) for frames in (98, FRAMES, 13)] if clips else pictures((5, 9), (3, 4), (12, 22))
    batch, model = [one.to(device) for one in batch], encoder(shape, torch.bfloat16, device, clips=clips)
    theirs = Theirs(shape, model.geometry, device, clips=clips)
    exact = theirs.rows(batch, torch.float32)
    ours, transformers = model(batch), theirs.rows(batch, torch.bfloat16)
    errors = [((rows - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item() for rows in (ours, transformers)]
    return {"case": f"{name} bf16 check", "ours": errors[0], "transformers": errors[1], "ratio": errors[0] / errors[1]}


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Each as a line of JSON."""
    for row in rows:
        rounded = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(rounded), flush=True)


def flops(geometry: VisionGeometry, cells: int) -> float:
    """Of one picture's products and attention."""
    layer, rows = geometry.layers[0], cells * CELL**2
    wide = geometry.heads * layer.head_dim
    each = 2 * rows * geometry.hidden * (4 * wide + 3 * layer.intermediate) + 4 * rows**2 * wide
    return float(len(geometry.layers) * each + 2 * rows * geometry.hidden * 768 + 2 * cells * geometry.hidden * geometry.model)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the quickest of REPEATS runs, behind one that is not timed."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return min(times[1:])


def product_rate(device: torch.device, size: int) -> float:
    """FLOP/s of one large bf16 product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


def rates(
    name: str, shape: ModelShape, counts: list[int], device: torch.device, peak: float, *, clips: bool
) -> Iterator[dict[str, Any]]:
    """A row a size and batch; some of them are encoded one by one in the same run."""
    model = encoder(shape, torch.bfloat16, device, clips=clips)
    sizes = {"30 s": (0, 0)} if clips else SIZES if device.type == "cuda" else {"tiny": (2, 3)}
    for size, cells in sizes.items():
        one = (torch.randn((FRAMES, 128)) if clips else pictures(cells)[0]).to(device)
        alone = seconds(lambda one=one: model([one]), device)  # type: ignore[misc]
        for count in counts:
            together = seconds(lambda one=one, count=count: [model(part) for part in batches(model, [one] * count)], device)  # type: ignore[misc]
            row = {"case": f"{name} {size}", "batch": count, "a second": count / together, "one by one": 1 / alone}
            work = 0.0 if clips else flops(model.geometry, cells[0] * cells[1])
            yield {**row, "times": alone * count / together, "share of product rate": work * count / together / peak}


def kernels(shape: ModelShape, device: torch.device) -> str:
    """Where the time of six pictures of 720p goes."""
    model, batch = encoder(shape, torch.bfloat16, device), [made.to(device) for made in pictures(*[SIZES["720p"]] * 6)]
    model(batch)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        model(batch)
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=48))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.encoders", description=__doc__)
    parser.add_argument("--members", nargs="+", default=["e2b", "31b"], choices=[name for name in PUBLIC if name != "12b"])
    parser.add_argument("--clips", action="store_true", help="of the small members")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 6, 16, 64])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nano", action="store_true", help="nano shapes")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    peak = product_rate(device, 8192 if device.type == "cuda" else 256)
    print(f"{ENCODER_ROWS} rows a batch, one product {peak / 1e12:.0f} TFLOP/s")
    for name in args.members:
        shape = (SHAPES if args.nano else PUBLIC)[name]
        show([check(name, shape, device, clips=args.clips)])
        show(rates(name, shape, args.batches, device, peak, clips=args.clips))
        if device.type == "cuda" and not args.clips:
            print(kernels(shape, device))


if __name__ == "__main__":
    main()
