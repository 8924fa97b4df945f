"""FlashInfer's version, kernel binaries and launchers on this node, found without importing torch."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

Launcher = Literal["prebuilt", "nvcc"]


class FlashInferFiles(NamedTuple):
    version: str | None = None
    cubins: str | None = None  # folder of all trtllm-gen kernels
    launcher: Launcher | None = None  # compiled parts from flashinfer-jit-cache, or by nvcc at the first call


def flashinfer_files() -> FlashInferFiles:
    version = installed("flashinfer-python")
    package = package_folder("flashinfer")
    if version is None or package is None:
        return FlashInferFiles()
    return FlashInferFiles(version, _cubins(package, version), _launcher(version))


def _cubins(package: Path, version: str) -> str | None:
    folder = _cubin_folder(version)
    kernels = _kernel_path(package)
    if kernels is None or not (folder / kernels / "checksums.txt").is_file():
        return None
    listed = (folder / kernels / "checksums.txt").read_text(encoding="utf-8").count(".cubin")
    on_disk = sum(entry.name.endswith(".cubin") for entry in os.scandir(folder / kernels))
    if 0 < listed <= on_disk:
        return str(folder)
    return None


def _cubin_folder(version: str) -> Path:
    """FlashInfer's order: its variable, the package of the same version, the cache."""
    if named := os.environ.get("FLASHINFER_CUBIN_DIR"):
        return Path(named)
    package = package_folder("flashinfer_cubin")
    unchecked = os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK")
    if package is not None and (unchecked or installed("flashinfer-cubin") == version):
        return package / "cubins"
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer" / "cubins"


def _kernel_path(package: Path) -> str | None:
    """Reads FlashInfer's artifacts.py: the folder of attention kernels is named by their build."""
    artifacts = package / "artifacts.py"
    if artifacts.exists():
        source = artifacts.read_text(encoding="utf-8")
    else:
        source = ""
    named = re.search(r'class ArtifactPath\b.*?\bTRTLLM_GEN_FMHA\b[^"]*"([^"]+)"', source, re.DOTALL)
    if named:
        return named[1]
    return None


def _launcher(version: str) -> Launcher | None:
    if (installed("flashinfer-jit-cache") or "").partition("+")[0] == version:
        return "prebuilt"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    ninja = shutil.which("ninja") or importlib.util.find_spec("ninja")
    if nvcc and ninja:
        return "nvcc"
    return None


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_folder(package: str) -> Path | None:
    """Does not import the package."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    return None
