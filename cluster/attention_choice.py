"""Chooses a group's attention backends by GPU, packages and settings (engine/README.md has the table)."""

from typing import NamedTuple

from cluster.capability import ComputeCapability, check_group, probe
from engine.attention import BACKENDS, OWN
from engine.attention.backend_entry import ROW_KINDS, BackendEntry, Obstacle, Platform, RowKind
from engine.attention.flashinfer_files import FlashInferFiles
from engine.attention.trtllm_mha import missing
from engine.config import AttentionName, EngineConfig
from engine.errors import ConfigError
from engine.weight_formats import NVFP4_GPUS, NVFP4_NEEDS

_OLDEST = (8, 0)  # bf16 in tensor cores
_OLDEST_WITH_FP8 = (8, 9)


class AttentionChoice(NamedTuple):
    """fallbacks: parts that failed a self-check, a sentence each. advice: what would change the choice"""

    decode: AttentionName
    extend: AttentionName
    reason: str
    advice: str
    fallbacks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.decode == self.extend:
            name = self.decode
        else:
            name = f"{self.decode} decode, {self.extend} extend"
        if self.fallbacks:
            return f"{name}, with fallbacks"
        return name

    def __str__(self) -> str:
        return "; ".join([f"attention {self.name}: {self.reason}", *self.fallbacks])


def attention_here(config: EngineConfig) -> AttentionChoice:
    """ConfigError: too few or different GPUs, or an impossible setting."""
    capability = probe("" if config.device == "cpu" else None)
    if config.device == "cuda":
        check_group(capability, config.tp)
    return choose_attention(config, capability.architecture, capability.flashinfer)


def choose_attention(config: EngineConfig, architecture: ComputeCapability | None, flashinfer: FlashInferFiles) -> AttentionChoice:
    platform = Platform(
        architecture, flashinfer, config.dtype, config.flashinfer_download, config.widest > 1, config.kv_dtype
    )
    if architecture is not None and architecture < _OLDEST:
        raise ConfigError(f"{platform.gpu} is too old: Quartet's kernels compute in bf16, which needs SM80")
    if architecture is not None and config.kv_dtype == "fp8" and architecture < _OLDEST_WITH_FP8:
        needs = "kv_dtype fp8 needs a GPU of compute capability 8.9 or later"
        raise ConfigError(f"{needs}, and this is {platform.gpu}: set kv_dtype: auto")
    if architecture is not None and config.weights == "nvfp4":
        _check_nvfp4(architecture, platform)
    if architecture:
        reason = f"{platform.gpu}; as the settings ask"
    else:
        reason = platform.gpu
    names = []
    passed: list[Obstacle] = []
    for kind in ROW_KINDS:
        if name := config.attention_of(kind):
            _check(kind, BACKENDS[name], platform)
        else:
            default = _default(kind, platform, passed)
            name = default.name
            reason = default.reason(platform)
        names.append(name)
    decode, extend = names
    first = passed[0] if passed else Obstacle(reason)
    return AttentionChoice(decode, extend, first.reason, first.advice)


def _check_nvfp4(architecture: ComputeCapability, platform: Platform) -> None:
    if architecture not in NVFP4_GPUS:
        raise ConfigError(f"weights nvfp4 needs {NVFP4_NEEDS}, and this is {platform.gpu}: set weights: auto")
    for obstacle in missing(platform, fetched=False):
        raise ConfigError(f"weights nvfp4: {obstacle.reason} ({obstacle.advice})")


def _check(kind: RowKind, entry: BackendEntry, platform: Platform) -> None:
    for obstacle in entry.obstacles(kind, platform):
        if not obstacle.by_default:
            if obstacle.advice:
                advice = f" ({obstacle.advice})"
            else:
                advice = ""
            raise ConfigError(f"attention_{kind}: {entry.name}: {obstacle.reason}{advice}")
    if entry.device != platform.device:
        if entry.device == "cpu":
            why = "runs on the CPU; on a GPU"
        else:
            why = "needs a GPU; this engine runs on the CPU, where"
        raise ConfigError(f"attention_{kind}: {entry.name} {why} {OWN[platform.device].name} is the backend")


def _default(kind: RowKind, platform: Platform, passed: list[Obstacle]) -> BackendEntry:
    """The last without obstacles; adds later ones' to `passed`."""
    for entry in reversed(BACKENDS.values()):
        if entry.device == platform.device:
            obstacles = list(entry.obstacles(kind, platform))
            if not obstacles:
                break
            passed += obstacles
    return entry
