"""This node's GPUs, as CUDA shows them, and FlashInfer's files. By NVML, without torch."""

import logging
import os
from dataclasses import dataclass, field

import pynvml

from engine.attention.flashinfer_files import FlashInferFiles, flashinfer_files
from engine.errors import ConfigError

ComputeCapability = tuple[int, int]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """NVML's `index`, compute capability ((9, 0) is Hopper), memory in bytes."""

    index: int
    name: str
    uuid: str
    capability: ComputeCapability
    memory: int


Gpus = tuple[Gpu, ...]


@dataclass(frozen=True)
class Capability:
    gpus: Gpus = ()
    flashinfer: FlashInferFiles = field(default_factory=FlashInferFiles)

    @property
    def architecture(self) -> ComputeCapability | None:
        return min((gpu.capability for gpu in self.gpus), default=None)


def probe(visible: str | None = None) -> Capability:
    if visible is None:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
    else:
        named = visible
    return Capability(visible_gpus(node_gpus(), named), flashinfer_files())


def check_group(capability: Capability, tp: int) -> None:
    """ConfigError if the first `tp` GPUs are too few, or differ."""
    if tp > len(capability.gpus):
        raise ConfigError(f"tp {tp} needs {tp} GPUs on one node; this one shows {len(capability.gpus)}: check num_gpus, tp, device")
    first, *others = capability.gpus[:tp]
    for gpu in others:
        if (gpu.name, gpu.capability) != (first.name, first.capability):
            kinds = f"GPU {first.index} is {first.name}, GPU {gpu.index} is {gpu.name}"
            raise ConfigError(f"the GPUs of a group must agree: {kinds}; choose with CUDA_VISIBLE_DEVICES")


def visible_gpus(gpus: Gpus, named: str | None) -> Gpus:
    """The devices of CUDA_VISIBLE_DEVICES, in order; as in CUDA, an unknown one ends the list."""
    if named is None:
        return gpus
    shown = []
    for entry in map(str.strip, named.split(",")):
        matches = [gpu for gpu in gpus if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))]
        if len(matches) != 1 or matches[0] in shown:
            break
        shown += matches
    return tuple(shown)


def node_gpus() -> Gpus:
    """All GPUs in NVML's (PCI) order; empty without a driver."""
    try:
        pynvml.nvmlInit()
        try:
            return tuple(map(_gpu, range(pynvml.nvmlDeviceGetCount())))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if not isinstance(error, pynvml.NVMLError_LibraryNotFound):
            logger.warning("no GPU is used, as the driver does not answer: %s", error)
        return ()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle), capability, memory)
