"""Pictures a second of a rank's vision encoder, all at once and one by one: `python -m tests.bench.encoders`; JSON rows.

    check   the error of our bf16 rows, relative to transformers' own in bf16: both against transformers' in fp32
    rate    pictures of one size, `batch` of them in the batches that a rank makes of them (`engine.memory.ENCODER_ROWS`); beside it
            the same one by one, and the products' share of what one large matrix product reaches here

With `--nano --device cpu` it runs anywhere, and times nothing that matters.
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

from engine.memory import ENCODER_ROWS
from engine.rank.load.random_fill import dummy
from engine.rank.load.slices import pieces
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.rank.models.vision import Tower, VisionEmbedder, VisionEncoder
from engine.rank.stages.encode_stage import batches
from engine.vision_geometry import CELL, VisionGeometry, read_vision
from tests.nano.model_shapes import PUBLIC, ModelShape, config
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.dummy_tensors import dummy_tensor
from tests.support.judge.pictures import padded, pictures

SIZES = {"480x480": (16, 16), "720p": (12, 22), "1120 tokens": (25, 44)}  # rows and columns of cells
REPEATS = 3


def encoder(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> VisionEncoder:
    """Of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(shape, "bfloat16")))
        geometry = read_vision(Path(folder))
    assert geometry is not None
    model = (VisionEmbedder if geometry.unified else Tower)(geometry, dtype, device)
    dummy(model, ENCODER_TENSORS[VisionGeometry])
    return model


class Theirs:
    """transformers' tower with the same weights."""

    def __init__(self, shape: ModelShape, geometry: VisionGeometry, device: torch.device) -> None:
        from transformers import Gemma4Config
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        self.config = Gemma4Config(**config(shape, "bfloat16"))
        self.tower = Gemma4VisionModel(self.config.vision_config).to(device).eval()
        self.embedder = Gemma4MultimodalEmbedder(self.config.vision_config, self.config.text_config).to(device)
        tensors = ENCODER_TENSORS[VisionGeometry]
        weights = {name: dummy_tensor(name, tensors, geometry, 0, device) for name in pieces(tensors, geometry)}
        strip = {name.removeprefix("model.vision_tower."): x for name, x in weights.items() if "vision_tower" in name}
        missing = self.tower.load_state_dict(strip, strict=False).missing_keys
        assert all(name.endswith(("_min", "_max")) for name in missing), missing
        self.embedder.load_state_dict({"embedding_projection.weight": weights["model.embed_vision.embedding_projection.weight"]})

    def rows(self, batch: list[Tensor], dtype: torch.dtype) -> Tensor:
        tower, embedder = self.tower.to(dtype), self.embedder.to(dtype)
        made = []
        for picture in batch:
            pixels, places = padded(self, [picture.cpu()], picture.shape[0] * picture.shape[1] // 2304)
            device = picture.device
            out = tower(pixel_values=pixels.to(device), pixel_position_ids=places.to(device)).last_hidden_state
            made.append(embedder(inputs_embeds=out).view(-1, embedder.embedding_projection.out_features))
        return torch.cat(made).float()


def check(name: str, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """Root mean square errors, relative to the rows'; the bar of the ratio is 1.25."""
    batch = [picture.to(device) for picture in pictures((5, 9), (3, 4), (12, 22))]
    model = encoder(shape, torch.bfloat16, device)
    theirs = Theirs(shape, model.geometry, device)
    return compared(name, theirs.rows(batch, torch.float32), model(batch), theirs.rows(batch, torch.bfloat16))


def compared(name: str, exact: Tensor, ours: Tensor, transformers: Tensor) -> dict[str, Any]:
    """The errors of rows in bf16."""
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


def rates(name: str, shape: ModelShape, counts: list[int], device: torch.device, peak: float) -> Iterator[dict[str, Any]]:
    """A row a size and batch; single pictures are encoded one by one in the same run."""
    model = encoder(shape, torch.bfloat16, device)
    for size, cells in SIZES.items() if device.type == "cuda" else {"tiny": (2, 3)}.items():
        (picture,) = (made.to(device) for made in pictures(cells))
        for count in counts:
            batch, work = [picture] * count, flops(model.geometry, cells[0] * cells[1])
            together = seconds(lambda batch=batch: [model(part) for part in batches(model, batch)], device)  # type: ignore[misc]
            alone = seconds(lambda batch=batch: [model([one]) for one in batch[:8]], device) / min(8, count)  # type: ignore[misc]
            row = {"case": f"{name} {size}", "batch": count, "images/s": count / together, "one by one": 1 / alone}
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
        show([check(name, shape, device)])
        show(rates(name, shape, args.batches, device, peak))
        if device.type == "cuda":
            print(kernels(shape, device))


if __name__ == "__main__":
    main()
