"""The shape of an audio tower, or of the 12B's rows of raw samples, from `audio_config`. No torch.

Source: the public configs and transformers' `models/gemma4` and `models/gemma4_unified`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import InvalidRequest
from engine.geometry import Geometry, Implemented, Layer, Rope, read_section
from engine.protocol import JsonObject, MediaItem

MELS: Final = 128
EPS: Final = 1e-6  # of all its norms
_IMPLEMENTED: Final[Implemented] = {
    "attention_context_right": (0,),
    "gradient_clipping": (1e10,),
    "hidden_act": ("silu",),
    "residual_weight": (0.5,),
    "rms_norm_eps": (EPS,),
}


@dataclass(frozen=True)
class AudioGeometry(Geometry):
    """Fields that an audio encoder does not use are its model's."""

    model: int  # hidden size of the model that reads its rows
    output: int  # width of the tower's output, or of its rows
    features: int = MELS  # of an input row: of a log-mel frame or, without a tower, samples
    channels: tuple[int, int] = (0, 0)  # of the tower's two convolutions
    kernel: int = 0  # rows of a layer's convolution, its own last
    reach: int = 0  # rows that attention sees
    cap: float = 0.0  # of attention's logits

    @property
    def unified(self) -> bool:
        return not self.reach

    def check(self, item: MediaItem) -> None:
        """InvalidRequest unless the item has data for each of its positions."""
        rows, features = item.shape if len(item.shape) == 2 else (0, 0)
        if features != self.features or item.length != self.tokens(rows) or item.spans:
            raise InvalidRequest(f"audio of shape {item.shape} does not fit {item.length} positions")

    def tokens(self, rows: int) -> int:
        if self.unified:
            return rows
        return tower_tokens(rows)


def tower_tokens(frames: int) -> int:
    return -(-frames // 4)


def read_audio(folder: Path) -> AudioGeometry | None:
    return read_section(folder, "audio_config", _IMPLEMENTED, _geometry)


def _geometry(audio: JsonObject, text: Geometry) -> AudioGeometry:
    common = {**vars(text), "model": text.hidden, "eps": EPS, "ple": 0, "moe": None}
    if (samples := audio.get("audio_embed_dim")) is not None:
        return AudioGeometry(**{**common, "layers": _layers(1, 1, 0), "heads": 1}, features=samples, output=samples)
    heads = audio["num_attention_heads"]
    hidden = audio["hidden_size"]
    first, second = audio["subsampling_conv_channels"]
    return AudioGeometry(
        **{**common, "hidden": hidden, "heads": heads, "layers": _layers(audio["num_hidden_layers"], heads, hidden)},
        channels=(first, second),
        kernel=audio["conv_kernel_size"],
        reach=audio["attention_context_left"] - 1,
        cap=audio["attention_logit_cap"],
        output=audio["output_proj_dims"],
    )


def _layers(count: int, heads: int, hidden: int) -> tuple[Layer, ...]:
    """Without a tower, layers have width 0."""
    rope = Rope(1.0, 0)
    return tuple(Layer(i, "sliding", hidden // heads, heads, rope, 4 * hidden, kv_source=i) for i in range(count))
