"""An attention backend without torch: its name, device and requirements."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from engine.attention.flashinfer_files import FlashInferFiles

RowKind = Literal["decode", "extend"]
ROW_KINDS: tuple[RowKind, ...] = ("decode", "extend")


class Platform(NamedTuple):
    architecture: tuple[int, int] | None  # the GPUs' compute capability; None on the CPU
    flashinfer: FlashInferFiles
    dtype: str = "bfloat16"
    download: bool = False  # FlashInfer may fetch kernels
    drafts: bool = False  # decode rows may have several tokens
    kv_dtype: str = "auto"

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        if self.architecture is None:
            return "cpu"
        return "cuda"

    @property
    def gpu(self) -> str:
        if self.architecture is None:
            return "no GPU"
        return f"SM{self.architecture[0]}{self.architecture[1]}"


class Obstacle(NamedTuple):
    """Why a backend is not chosen, and advice. `by_default`: it can still be asked for."""

    reason: str
    advice: str = ""
    by_default: bool = False


class PackageState(NamedTuple):
    """A package that a backend needs, as `quartet doctor` shows it."""

    name: str
    usable: bool
    detail: str
    advice: str


class BackendEntry(NamedTuple):
    name: str
    device: Literal["cpu", "cuda"]
    parts: str  # the module in `engine/rank/attention/` whose `parts` makes them (`base.AttentionParts`)
    # what stands between rows of a kind and this backend on a GPU, the most lasting first
    obstacles: Callable[[RowKind, Platform], Iterable[Obstacle]] = lambda *_: ()
    reason: Callable[[Platform], str] = lambda platform: platform.gpu  # why it is the default
    package: Callable[[Platform], PackageState | None] = lambda _: None  # the package that it needs, where that is installed
