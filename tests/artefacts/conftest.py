"""The image, built once a session from Debian's packages, or the one that QUARTET_IMAGE names."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.artefacts.images import base_image, build
from tests.support.repo_rules import ROOT


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the image is built from, which a test may change."""
    unused = shutil.ignore_patterns(".git", ".venv", "__pycache__", "tests")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("image") / "checkout", ignore=unused))


@pytest.fixture(scope="session")
def image(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the CPU image."""
    if given := os.environ.get("QUARTET_IMAGE"):
        return given
    if "QUARTET_BUILD_OPTIONS" not in os.environ:
        pytest.skip("QUARTET_IMAGE names an image, or QUARTET_BUILD_OPTIONS has options of buildah, perhaps none, to build one")
    missing = [tool for tool in ("buildah", "mmdebstrap", "podman", "catatonit") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and, of Debian, {' '.join(missing) or 'buildah'}; or QUARTET_IMAGE names an image")
    base_image(tmp_path_factory.mktemp("base") / "base.tar")
    return build("localhost/quartet:test", checkout)
