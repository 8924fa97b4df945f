"""Which attention backend a group runs, and why: one pure table of what a GPU, FlashInfer and the settings allow.

    GPU                      decode rows                                     prefill chunks
    SM100 family (10.x)      trtllm_mha, FlashInfer usable; else triton      the same, by itself
    9.0 and 12.x             triton; trtllm_mha when asked for (xqa)         triton
    8.x                      triton                                          triton
    below 8.0                refused: its kernels compute in bf16            refused
    none                     reference                                       reference

The replica chooses, once, for all ranks of its group: a group's GPUs are equal and on one node, so its ranks agree; the replicas of
a fleet may differ. A setting that asks for what cannot be is a ConfigError with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from cluster.flashinfer_files import FlashInferFiles
from engine.config import AttentionName, EngineConfig
from engine.errors import ConfigError

Rows = Literal["decode", "extend"]
SM100 = 10
_XQA = (9, 12)  # major versions whose decode rows FlashInfer serves by its own kernels
_OLDEST = (8, 0)  # bf16 in tensor cores
TESTED_VERSIONS = ("0.7.0", "0.8")  # FlashInfer from, and below: its calls are pinned (tests/support/flashinfer_calls.py)
CUBIN_DOWNLOAD_COMMAND = "FLASHINFER_CUBIN_DIR=/opt/flashinfer-cubins flashinfer download-cubin"


@dataclass(frozen=True)
class AttentionChoice:
    """The backends of both kinds of rows, one line of why, and what would change it ("": nothing would).

    fallbacks: what a rank's self-check found wrong, and runs otherwise; a sentence each.
    """

    decode: AttentionName
    extend: AttentionName
    reason: str
    advice: str = ""
    fallbacks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For a label: one name, or both where they differ."""
        name = self.decode if self.decode == self.extend else f"{self.decode} decode, {self.extend} extend"
        return f"{name}, with fallbacks" if self.fallbacks else name

    def __str__(self) -> str:
        return "; ".join([f"attention {self.name}: {self.reason}", *self.fallbacks])


@dataclass(frozen=True)
class _Obstacle:
    """Why trtllm_mha is not chosen, and what would help. `by_default`: it can be asked for all the same."""

    reason: str
    advice: str = ""
    by_default: bool = False


_Obstacles = dict[Rows, list[_Obstacle]]
_Asked = dict[Rows, AttentionName | None]


def choose_attention(config: EngineConfig, architecture: tuple[int, int] | None, found: FlashInferFiles) -> AttentionChoice:
    """For a group on GPUs of compute capability `architecture`, None: on the CPU."""
    asked: _Asked = {
        "decode": config.attention_decode or config.attention,
        "extend": config.attention_extend or config.attention,
    }
    if architecture is not None and architecture < _OLDEST:
        raise ConfigError(f"{_gpu(architecture)} is too old: Quartet's kernels compute in bf16, which needs SM80")
    obstacles = {rows: list(_obstacles(rows, config, architecture, found)) for rows in asked}
    chosen = {rows: _one(rows, name, architecture, obstacles[rows]) for rows, name in asked.items()}
    reason, advice = _why(asked, architecture, found, obstacles)
    return AttentionChoice(chosen["decode"], chosen["extend"], reason, advice)


def _one(
    rows: Rows, asked: AttentionName | None, architecture: tuple[int, int] | None, obstacles: list[_Obstacle]
) -> AttentionName:
    hard = next((obstacle for obstacle in obstacles if not obstacle.by_default), None)
    if asked == "trtllm_mha" and hard is not None:
        raise ConfigError(f"attention_{rows}: trtllm_mha: {hard.reason}" + (f" ({hard.advice})" if hard.advice else ""))
    if asked == "reference" and architecture is not None:
        raise ConfigError(f"attention_{rows}: reference runs on the CPU; on a GPU triton is the backend")
    if asked == "triton" and architecture is None:
        raise ConfigError(f"attention_{rows}: triton needs a GPU; this engine runs on the CPU, where reference is the backend")
    if asked is not None:
        return asked
    if architecture is None:
        return "reference"
    return "triton" if obstacles else "trtllm_mha"


def _why(
    asked: _Asked, architecture: tuple[int, int] | None, found: FlashInferFiles, obstacles: _Obstacles
) -> tuple[str, str]:
    if architecture is None:
        return "no GPU", ""
    if all(asked.values()):
        return f"{_gpu(architecture)}; as the settings ask", ""
    first = next((obstacles[rows][0] for rows, name in asked.items() if name is None and obstacles[rows]), None)
    if first is not None:
        return first.reason, first.advice
    return f"{_gpu(architecture)} with FlashInfer {found.version}, kernels in {found.cubins or 'the network'}", ""


def _obstacles(
    rows: Rows, config: EngineConfig, architecture: tuple[int, int] | None, found: FlashInferFiles
) -> Iterator[_Obstacle]:
    """What stands between these rows and trtllm_mha, the most lasting first."""
    if architecture is None:
        yield _Obstacle("it needs a GPU; this engine runs on the CPU")
        return
    gpu, major = _gpu(architecture), architecture[0]
    if major in _XQA:
        yield _Obstacle(f"{gpu} is not of the SM100 family: triton by default", by_default=True)
    if major in _XQA and rows == "extend":
        yield _Obstacle(f"{gpu} is not of the SM100 family, which alone has the kernels for prefill")
    if major != SM100 and major not in _XQA:
        yield _Obstacle(f"{gpu} is not of the SM100 family, and FlashInfer has no such kernels for it")
    if config.page not in (16, 32, 64):
        yield _Obstacle(f"its kernels take pages of 16, 32 or 64 tokens, not {config.page}")
    if config.dtype != "bfloat16":
        yield _Obstacle(f"its kernels compute in bfloat16, not {config.dtype}")
    yield from _missing(gpu, found, fetched=major == SM100, download=config.flashinfer_download)


def _missing(gpu: str, found: FlashInferFiles, *, fetched: bool, download: bool) -> Iterator[_Obstacle]:
    """What FlashInfer lacks here. fetched: the kernels are binaries that it would otherwise fetch at the first request."""
    if found.version is None:
        yield _Obstacle(f"{gpu} without FlashInfer", "make install-gpu")
        return
    oldest, ceiling = (Version(version) for version in TESTED_VERSIONS)
    if not oldest <= Version(found.version) < ceiling:
        yield _Obstacle(f"FlashInfer {found.version} is not among those tried, {oldest} to below {ceiling}", "make install-gpu")
    if found.launcher is None:
        yield _Obstacle(
            f"FlashInfer {found.version} can build no launcher: nvcc and ninja are not both there",
            "install the CUDA toolkit and ninja, or flashinfer-jit-cache of the same version",
        )
    if fetched and found.cubins is None and not download:
        yield _Obstacle(
            f"FlashInfer {found.version} lacks its kernels on disk, and no request may wait for a download",
            f"when the image is built: {CUBIN_DOWNLOAD_COMMAND}; or flashinfer_download: true",
        )


def _gpu(architecture: tuple[int, int]) -> str:
    return f"SM{architecture[0]}{architecture[1]}"
