"""Builds the image by buildah, from Debian's packages alone: no registry of images is asked."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.support.repo_rules import ROOT

BASE = "localhost/debian:bookworm-slim"
SLIM = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale")]  # as debian:bookworm-slim is


def base_image(archive: Path) -> None:
    """Makes the image that the Dockerfile begins with. `archive`: a file for it. The same packages make the same image, so that
    buildah still has the layers above it."""
    dated = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    subprocess.run(["mmdebstrap", "--quiet", "--variant=apt", *SLIM, "bookworm", str(archive)], check=True, env=dated, timeout=600)
    made = subprocess.run(["buildah", "from", "scratch"], check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()
    subprocess.run(["buildah", "add", "--quiet", made, str(archive)], check=True, timeout=300)
    subprocess.run(["buildah", "commit", "--quiet", "--timestamp", "0", "--rm", made, BASE], check=True, timeout=300)


def build(name: str, context: Path) -> str:
    """Builds the image of a checkout by the README's command, and returns its name. QUARTET_BUILD_OPTIONS has further options of
    `buildah build`, such as PIP_FIND_LINKS with torch's wheels for CPUs, and volumes with pip's configuration."""
    (line,) = re.findall(r"^docker build (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    command = ["buildah", "build", "--layers", "--format", "docker", "--network", "host", "--tag", name]
    command += ["--build-arg", f"BASE={BASE}"]
    command += shlex.split(os.environ.get("QUARTET_BUILD_OPTIONS", ""))
    command += shlex.split(line)
    subprocess.run(command, check=True, cwd=context, env={**os.environ, "BUILDAH_ISOLATION": "chroot"}, timeout=1800)
    return name
