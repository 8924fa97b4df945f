"""LoRA adapters by name: settings, and adapter_config.json of a PEFT folder. No torch.

y = W x + scale * B A x        scale = alpha / r, or alpha / sqrt(r) with rsLoRA
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.checkpoint import read_json
from engine.errors import CheckpointError
from engine.protocol import FrozenStruct

MAX_ADAPTERS = 64
MAX_RANK = 512
NO_ADAPTER = -1  # the index of the model itself
_CONFIG = "adapter_config.json"
_CONFIG_BYTES = 1 << 20  # of adapter_config.json, at most
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
_Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]

NAME = r"[^\s/\\][^\s\\]*"
AdapterName = Annotated[str, Meta(min_length=1, max_length=256, pattern=f"^{NAME}$")]
AdapterFolder = Annotated[str, Meta(max_length=4096, pattern=r"^(/.*|nano:.*|[^/\s]+/[^/\s]+)$")]
AdapterFolders = Annotated[dict[AdapterName, AdapterFolder], Meta(max_length=MAX_ADAPTERS)]

# Keys of adapter_config.json that change no product of a trained adapter.
_NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "target_modules",
    "target_parameters", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights",
})  # fmt: skip
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mmd")  # initialisations that change the model's own weights


class _PeftConfig(FrozenStruct):
    peft_type: str
    r: _Rank
    lora_alpha: _Alpha
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True


@dataclass(frozen=True)
class AdapterConfig:
    name: str
    folder: Path
    peft: _PeftConfig

    @property
    def file(self) -> Path:
        return self.folder / "adapter_model.safetensors"

    def rank(self, module: str) -> int:
        return int(_of_module(self.peft.rank_pattern, module, self.peft.r))

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = float(_of_module(self.peft.alpha_pattern, module, self.peft.lora_alpha))
        if self.peft.use_rslora:
            return alpha / math.sqrt(rank)
        return alpha / rank


def read_adapter(name: str, folder: Path) -> AdapterConfig:
    """CheckpointError names the adapter and the key that is not supported."""
    path = folder / _CONFIG
    if path.exists() and not (path.is_file() and path.stat().st_size <= _CONFIG_BYTES):
        raise CheckpointError(f"adapters.{name}: {path} is no file of at most {_CONFIG_BYTES} bytes")
    try:
        given = read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"adapters.{name}: {error}") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"adapters.{name}: {folder / _CONFIG}: not a JSON object")
    if given.get("peft_type") != "LORA":
        raise CheckpointError(f"adapters.{name}: peft_type {given.get('peft_type')!r:.40}: only LORA is served")
    try:
        peft = msgspec.convert(given, _PeftConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"adapters.{name}: {folder / _CONFIG}: {error}") from error
    refused = _refused(given, peft)
    if refused:
        raise CheckpointError(f"adapters.{name}: {_CONFIG} asks for what is not served: {', '.join(refused)}")
    config = AdapterConfig(name, folder, peft)
    if not config.file.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            advice = f"; it holds {pickles[0]}, and only safetensors are read"
        else:
            advice = ""
        raise CheckpointError(f"adapters.{name}: {folder} holds no {config.file.name}{advice}")
    return config


def _refused(given: Mapping[str, Any], peft: _PeftConfig) -> list[str]:
    refused = [f"{key}" for key, value in given.items() if value and key not in _NEUTRAL]
    if peft.bias != "none":
        refused.append(f"bias {peft.bias!r:.40}")
    start = str(peft.init_lora_weights).lower()
    if start.startswith(_CHANGING_STARTS):
        refused.append(f"init_lora_weights {start:.40}")
    return sorted(refused)


def _of_module(pattern: Mapping[str, float] | None, module: str, usual: float) -> float:
    """PEFT's rule: the first key that matches the end of the module's name."""
    for key, value in (pattern or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise CheckpointError(f"{key!r:.80} in a pattern of {_CONFIG}: {error}") from error
    return usual
