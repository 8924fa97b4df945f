"""What of FlashInfer is on a node, read from an installation of our own making."""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from engine.attention.flashinfer_files import FlashInferFiles, flashinfer_files

pytestmark = pytest.mark.pure

KERNELS = "abc123/fmha/trtllm-gen/"
ARTIFACTS = f'class Other:\n    TRTLLM_GEN_FMHA: str = "wrong"\n\n\nclass ArtifactPath:\n    TRTLLM_GEN_FMHA: str = "{KERNELS}"\n'
Installed = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Puts packages of the given versions on the path; `flashinfer` is one that must not be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flashinfer", "flashinfer_cubin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    versions = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)

    def make(**packages: str) -> Path:
        for name, number in packages.items():
            versions[name.replace("_", "-")] = number
        package = tmp_path / "flashinfer"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('imported')\n")
        (package / "artifacts.py").write_text(ARTIFACTS)
        return tmp_path

    return make


def files(environment: dict[str, str]) -> FlashInferFiles:
    """What is there in that environment."""
    with mock.patch.dict(os.environ, environment, clear=True):
        return flashinfer_files()


def kernels(folder: Path, listed: int, found: int) -> Path:
    """A folder of kernels, and the list of what should be in it."""
    (folder / KERNELS).mkdir(parents=True)
    lines = [f"00 {KERNELS}k{number}.cubin\n" for number in range(listed)]
    (folder / KERNELS / "checksums.txt").write_text("".join([*lines, "11 a.h\n"]))
    for number in range(found):
        (folder / KERNELS / f"k{number}.cubin").touch()
    return folder


def test_nothing_installed(installed: Installed) -> None:
    """No distribution, no files."""
    installed()
    assert files({}) == FlashInferFiles()


def test_the_named_folder_counts_when_it_is_whole(installed: Installed, tmp_path: Path) -> None:
    """FLASHINFER_CUBIN_DIR is where kernels lie; one that is missing, or no list, is none; nothing is imported."""
    installed(flashinfer_python="0.7.2")
    named = {"FLASHINFER_CUBIN_DIR": str(kernels(tmp_path / "whole", 3, 3)), "PATH": "", "CUDA_HOME": "/nowhere"}
    assert files(named) == FlashInferFiles("0.7.2", str(tmp_path / "whole"), None)
    assert files({**named, "FLASHINFER_CUBIN_DIR": str(kernels(tmp_path / "part", 3, 2))}).cubins is None
    assert files({**named, "FLASHINFER_CUBIN_DIR": str(tmp_path)}).cubins is None


def test_an_old_version_names_no_kernels(installed: Installed, tmp_path: Path) -> None:
    """It has no file that would; its version is found all the same, and beside it, where there is such a file, the kernels are."""
    artifacts = installed(flashinfer_python="0.2.5") / "flashinfer" / "artifacts.py"
    named = {"FLASHINFER_CUBIN_DIR": str(kernels(tmp_path / "whole", 3, 3)), "PATH": "", "CUDA_HOME": "/nowhere"}
    assert files(named).cubins == str(tmp_path / "whole")
    artifacts.unlink()
    assert files(named) == FlashInferFiles("0.2.5")


def test_the_kernels_package_counts_only_in_the_same_version(installed: Installed, tmp_path: Path) -> None:
    """flashinfer-cubin of another version is ignored, as FlashInfer does, unless its variable says otherwise; then the cache."""
    installed(flashinfer_python="0.7.2", flashinfer_cubin="0.6.13")
    kernels(tmp_path / "flashinfer_cubin" / "cubins", 2, 2)
    (tmp_path / "flashinfer_cubin" / "__init__.py").touch()
    cache = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert files(cache).cubins is None
    package = str(tmp_path / "flashinfer_cubin" / "cubins")
    assert files({**cache, "FLASHINFER_DISABLE_VERSION_CHECK": "1"}).cubins == package
    kernels(tmp_path / ".cache" / "flashinfer" / "cubins", 2, 2)
    assert files(cache).cubins == str(tmp_path / ".cache" / "flashinfer" / "cubins")
    assert files({**cache, "FLASHINFER_CUBIN_DIR": package}).cubins == package


def test_launchers(installed: Installed, tmp_path: Path) -> None:
    """nvcc counts with ninja beside it, the package of built launchers only in the same version."""
    installed(flashinfer_python="0.7.2")
    tools = tmp_path / "cuda" / "bin"
    tools.mkdir(parents=True)
    found = {"PATH": str(tools), "CUDA_HOME": str(tmp_path / "cuda")}
    assert files(found).launcher is None
    for name in ("nvcc", "ninja"):
        (tools / name).touch(mode=0o755)
    assert files(found).launcher == "nvcc"


def test_built_launchers(installed: Installed) -> None:
    """flashinfer-jit-cache of the same version is enough, whatever CUDA it was built for; another version is not."""
    installed(flashinfer_python="0.7.2", flashinfer_jit_cache="0.7.2+cu130")
    assert files({"PATH": "", "CUDA_HOME": "/nowhere"}).launcher == "prebuilt"
