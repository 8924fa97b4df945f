"""Pictures and clips in prompts: as the engine gets them, and as transformers' models do."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from engine.protocol import DecodedItem
from engine.vision_geometry import CELL, PATCH, SIDE


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the media among them."""

    ids: list[int]
    media: tuple[DecodedItem, ...] = ()

    def text(self, ids: Sequence[int]) -> "Prompt":
        """With so much text behind it."""
        return replace(self, ids=[*self.ids, *ids])

    def picture(self, picture: Tensor, placeholder: int) -> "Prompt":
        """With a picture uint8 [height, width, 3] behind it, or a video uint8 [frames, height, width, 3]: a token parts frames."""
        frames, first, spans, ids = picture.shape[0] if picture.dim() == 4 else 1, len(self.ids), [], list(self.ids)
        for frame in range(frames):
            ids += [7] * (frame > 0)
            spans.append((len(ids), len(ids) + math.prod(picture.shape[-3:-1]) // SIDE**2))
            ids += [placeholder] * (spans[-1][1] - spans[-1][0])
        data = picture.numpy().tobytes()
        kind, digest = ("image", "video")[picture.dim() == 4], hashlib.sha256(data).digest()
        item = DecodedItem(first, len(ids) - first, digest, tuple(spans), kind, tuple(picture.shape), data)
        return Prompt(ids, (*self.media, item))


    def clip(self, clip: Tensor, tokens: int, placeholder: int) -> "Prompt":
        """With a clip float32 [rows, features] of so many soft tokens behind it."""
        data = clip.numpy().tobytes()
        item = DecodedItem(len(self.ids), tokens, hashlib.sha256(data).digest(), (), "audio", tuple(clip.shape), data)
        return Prompt([*self.ids, *[placeholder] * tokens], (*self.media, item))


def pictures(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """uint8 [..., height, width, 3] of so many cells a side."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*frames, SIDE * rows, SIDE * columns, 3) for *frames, rows, columns in sizes]
    return [torch.randint(0, 256, shape, generator=generator).byte() for shape in shapes]


def as_inputs(model: transformers.PreTrainedModel, prompt: Prompt, count: int) -> dict[str, Tensor]:
    """What transformers' model is given for the pictures of a prompt that `count` tokens end."""
    types, given = torch.zeros(1, count, dtype=torch.int64), {}
    for number, (kind, suffix) in enumerate((("image", ""), ("video", "_videos")), start=1):
        items = [item for item in prompt.media if item.kind == kind]
        for first, last in (span for item in items for span in item.spans):
            types[0, first:last] = number
        frames = [frame for item in items for frame in _data(item, np.uint8).view(-1, *item.shape[-3:])]
        if frames:
            pixels, places = padded(model, frames, max(frame.shape[0] * frame.shape[1] // SIDE**2 for frame in frames) + 3)
            given |= {f"pixel_values{suffix}": pixels, f"{kind}_position_ids": places}
        if frames and kind == "video":
            given["num_frames_per_video"] = torch.tensor([item.shape[0] for item in items])
    clips = [_data(item, np.float32) for item in prompt.media if item.kind == "audio"]
    if clips:
        given["input_features"] = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
        lengths = torch.tensor([len(clip) for clip in clips])
        given["input_features_mask"] = torch.arange(given["input_features"].shape[1]) < lengths[:, None]
    return {**given, "mm_token_type_ids": types}


def _data(item: DecodedItem, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(item.data, dtype).reshape(item.shape).copy())


def padded(model: Any, frames: Sequence[Tensor], budget: int) -> tuple[Tensor, Tensor]:
    """Pixels fp32 [frames, rows, values] and positions int64 [frames, rows, 2] of pictures, padded as transformers does."""
    side, each = (SIDE, 1) if model.config.model_type == "gemma4_unified" else (PATCH, CELL**2)
    pixels, places = torch.zeros(len(frames), budget * each, 3 * side**2), torch.full((len(frames), budget * each, 2), -1)
    for at, picture in enumerate(frames):
        rows, columns = picture.shape[0] // side, picture.shape[1] // side
        patches = picture.view(rows, side, columns, side, 3).transpose(1, 2).reshape(rows * columns, -1)
        pixels[at, : len(patches)] = patches.float() * (1 / 255)
        places[at, : len(patches)] = torch.from_numpy(np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2))
    return pixels, places
