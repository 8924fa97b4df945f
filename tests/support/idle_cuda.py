"""A GPU that does nothing: Triton's own CUDA driver over a libcuda whose functions return success, built here by the C compiler.

Kernels are compiled for sm_90 and launched through Triton's launcher in C; none runs. Only for a process of its own, on a machine
without a GPU.
"""

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import triton

from kernels import launch as launcher

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
