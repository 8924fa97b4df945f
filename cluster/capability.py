"""What this node's GPUs can do, which attention backend that means, and why.

    SM100 family with FlashInfer   -> trtllm_mha
    any other GPU                  -> triton
    no GPU                         -> reference

Asks NVML, never torch, so that the replica stays light. trtllm_mha is not there yet: its GPUs run triton.
"""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

Backend = Literal["trtllm_mha", "triton", "reference"]
_SM100 = 10


@dataclass(frozen=True)
class Gpu:
    """One visible device. `index` is NVML's; `capability` the compute capability, (9, 0) for Hopper; memory in bytes."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Capability:
    """`backend_choice` is what these GPUs ask for; `reason` is one line for log and doctor."""

    backend_choice: Backend
    reason: str
    gpus: tuple[Gpu, ...] = ()

    @property
    def runs(self) -> Backend:
        """What this version has for these GPUs."""
        return "triton" if self.gpus else "reference"

    def __str__(self) -> str:
        return f"attention {self.runs}; this node asks for {self.backend_choice}: {self.reason}"


def probe(visible: str | None = None) -> Capability:
    """This node's capability. `visible` stands for CUDA_VISIBLE_DEVICES, which is read when it is None."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    return choose(visible_gpus(node_gpus(), named), flashinfer_version())


def choose(gpus: tuple[Gpu, ...], flashinfer: str | None) -> Capability:
    """The backend for `gpus`, given the version of FlashInfer that is installed (None: none)."""
    if not gpus:
        return Capability("reference", "no GPU is visible")
    major, minor = min(gpu.capability for gpu in gpus)
    device = f"{gpus[0].name} (SM{major}{minor})"
    if major != _SM100:
        return Capability("triton", f"{device} is not of the SM100 family", gpus)
    if flashinfer is None:
        return Capability("triton", f"{device} without FlashInfer (make install-gpu)", gpus)
    return Capability("trtllm_mha", f"{device} with FlashInfer {flashinfer}", gpus)


def check_group(capability: Capability, tp: int) -> tuple[Gpu, ...]:
    """The GPUs of a group of `tp` ranks: the first ones visible. ConfigError when they are too few, or differ."""
    if tp > len(capability.gpus):
        raise ConfigError(f"tp {tp} needs {tp} GPUs on one node; this one shows {len(capability.gpus)} (CPU: device: cpu)")
    gpus = capability.gpus[:tp]
    odd = next((gpu for gpu in gpus if (gpu.name, gpu.capability) != (gpus[0].name, gpus[0].capability)), None)
    if odd is not None:
        raise ConfigError(f"the GPUs of a group must agree: GPU {gpus[0].index} is {gpus[0].name}, GPU {odd.index} is {odd.name}")
    return gpus


def visible_gpus(gpus: tuple[Gpu, ...], named: str | None) -> tuple[Gpu, ...]:
    """The devices that `named` (CUDA_VISIBLE_DEVICES) shows, in its order; as in CUDA, an entry that is none hides what follows."""
    if named is None:
        return gpus
    shown: list[Gpu] = []
    for entry in named.split(","):
        found = [gpu for gpu in gpus if _matches(gpu, entry.strip())]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
    return tuple(shown)


def _matches(gpu: Gpu, entry: str) -> bool:
    return entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))


def node_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the node, in NVML's (PCI) order; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or one that does not answer: nothing here could run on a GPU
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def flashinfer_version() -> str | None:
    """The installed FlashInfer's version, or None. It is only looked up: importing it would import torch."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
