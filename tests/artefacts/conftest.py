"""The image, built once a session from Debian's packages, or the one that QUARTET_IMAGE names."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repo_rules import ROOT

BASE = "localhost/debian:bookworm-slim"
SLIM = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale")]  # as debian:bookworm-slim is


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the CPU image. QUARTET_BUILD_OPTIONS has further options of `buildah build`, such as volumes with pip's
    configuration."""
    if given := os.environ.get("QUARTET_IMAGE"):
        return given
    missing = [tool for tool in ("buildah", "mmdebstrap", "podman") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and, of Debian, {' '.join(missing) or 'buildah'}; or QUARTET_IMAGE names an image")
    base_image(tmp_path_factory.mktemp("base") / "base.tar")
    options = shlex.split(os.environ.get("QUARTET_BUILD_OPTIONS", ""))
    return build("localhost/quartet:test", *options)


def base_image(archive: Path) -> None:
    """Makes the image that the Dockerfile begins with, from Debian's packages."""
    subprocess.run(["mmdebstrap", "--quiet", "--variant=apt", *SLIM, "bookworm", str(archive)], check=True, timeout=600)
    made = subprocess.run(["buildah", "from", "scratch"], check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()
    subprocess.run(["buildah", "add", "--quiet", made, str(archive)], check=True, timeout=300)
    subprocess.run(["buildah", "commit", "--quiet", "--rm", made, BASE], check=True, timeout=300)


def build(name: str, *options: str, context: Path = ROOT) -> str:
    """Builds the CPU image of a checkout, and returns its name."""
    command = ["buildah", "build", "--layers", "--format", "docker", "--network", "host", "--tag", name]
    command += ["--build-arg", f"BASE={BASE}", "--build-arg", "DEVICE=cpu", *options]
    command += ["--file", str(context / "deploy" / "image" / "Dockerfile"), str(context)]
    environ = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    subprocess.run(command, check=True, env=environ, timeout=1800)
    return name
