"""What a rank launches before it is ready, on a GPU that does nothing: `python -m tests.support.engine.idle_boot '<EngineConfig>'`.

Prints JSON: how many kernels were found in Triton's cache on disk, and the name of the first that was not, where it ends.
"""

import atexit
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from engine.config import EngineConfig
from engine.rank.builder import build, load_rank
from engine.rank.parallel import Single
from kernels import launch as launcher
from kernels import linear
from kernels.precompile import set_cache_keys

_FUNCTIONS = """
cuCtxGetDevice cuCtxGetLimit cuCtxSetCurrent cuCtxSetLimit cuDeviceGet cuDevicePrimaryCtxRetain cuDriverGetVersion
cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorString cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleUnload
cuOccupancyMaxActiveClusters cuStreamIsCapturing cuTensorMapEncodeTiled cuTensorMapEncodeIm2col
"""
_SOURCE = "".join(f"int {name}() {{ return 0; }}\n" for name in _FUNCTIONS.split()) + """
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuPointerGetAttribute(unsigned long long *out, int attribute, unsigned long long pointer) { *out = pointer; return 0; }
"""


def use_idle_cuda() -> None:
    """From here on this process launches Triton's kernels to device 0, an sm_90 that runs none of them."""
    assert not torch.cuda.is_available(), "this machine has a GPU"
    folder = Path(tempfile.mkdtemp(prefix="quartet-idle-cuda-"))
    atexit.register(shutil.rmtree, folder)
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)],
        input=_SOURCE, text=True, check=True,
    )  # fmt: skip
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    (folder / "libcuda.so").symlink_to(library)  # by this name the linker looks for it
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "cache"))  # nobody else's driver is to be built against it
    torch.cuda.current_device = lambda: 0
    launcher._device_capability = lambda device: (9, 0)  # type: ignore[assignment]
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device, driver.get_device_capability = torch.cuda.current_device, launcher._device_capability
    driver.get_current_stream = lambda device: 0
    triton.runtime.driver.set_active(driver)


def main() -> None:
    """Warm up, and run what is captured, by Triton's own launches. A second argument: keys are set as kernels are launched."""
    hits, misses = list[str](), list[str]()

    def note(*, src: Any, cache_hit: bool, **others: object) -> None:
        (hits if cache_hit else misses).append(src.name)
        if misses:
            raise LookupError(src.name)

    use_idle_cuda()
    take_kernels()
    set_everywhere("uploaded", lambda tensor, to: tensor.clone())  # to memory of torch's, as aligned as a device's
    triton.knobs.compilation.listener = note
    if len(sys.argv) == 2:
        set_cache_keys()
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    with torch.inference_mode(), suppress(LookupError):
        rank = load_rank(config, Single(), torch.device("cpu"), checked=False)
        build(rank, [20 for _ in config.kv_groups]).list_launches(0, 1)
    print(json.dumps({"hits": len(hits), "misses": misses}))


def take_kernels() -> None:
    """Wrappers launch for tensors of the CPU what they would for a GPU's; the library's products are left out."""
    linear._library = lambda x, weight, out: out
    set_everywhere("enabled", lambda x, module="": True)
    set_everywhere("processors", lambda device: 132)


def set_everywhere(name: str, value: Any) -> None:
    """Sets what our modules have imported under `name`; `launch` itself stays."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("kernels.", "engine.rank.")) and hasattr(module, name) and module is not launcher:
            setattr(module, name, value)


if __name__ == "__main__":
    main()
