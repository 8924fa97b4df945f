"""The image, built once a session from Debian's packages, or the one that QUARTET_IMAGE names."""

import os
import shutil

import pytest

from tests.support.artefacts.images import base_image, build


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the CPU image."""
    if given := os.environ.get("QUARTET_IMAGE"):
        return given
    missing = [tool for tool in ("buildah", "mmdebstrap", "podman", "catatonit") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and, of Debian, {' '.join(missing) or 'buildah'}; or QUARTET_IMAGE names an image")
    base_image(tmp_path_factory.mktemp("base") / "base.tar")
    return build("localhost/quartet:test")
