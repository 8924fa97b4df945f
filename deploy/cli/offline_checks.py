"""The checks of `doctor --offline`."""

import os
from pathlib import Path

from cluster.capability import Capability
from deploy.cli.finding import Finding, Findings, checked
from deploy.models.resolve import folder_here, local_folder
from deploy.settings import Settings
from engine.checkpoint import read_index
from engine.errors import ConfigError


def offline(settings: Settings, node: Capability) -> Findings:
    yield model("model", settings.model, settings.revision)
    if settings.mtp.model and settings.mtp.drafts:
        yield model("mtp.model", settings.mtp.model, None)
    cubins = node.flashinfer.cubins
    fetches = settings.flashinfer_download and cubins is None
    if cubins:
        found = f"kernels in {cubins}"
    else:
        found = "no kernels on disk, and none are fetched (flashinfer_download: false)"
    if fetches:
        found = "flashinfer_download: true, and kernels are missing on disk"
    advice = "pip install flashinfer-cubin of FlashInfer's version, where there is a network, or set flashinfer_download: false"
    yield checked("offline: flashinfer", not fetches, found, advice, "fail")
    yield variable("HF_HUB_OFFLINE", "1", "the hub is asked for newer files at every start, and each answer is waited for")


def model(key: str, name: str, revision: str | None) -> Finding:
    title = f"offline: {key}"
    try:
        if folder := local_folder(name):
            return Finding(title, "ok", f"{name}: {folder}")
    except ConfigError as error:
        return Finding(title, "fail", str(error), "put its folder there")
    cached = folder_here(name, revision)
    missing = missing_files(cached, key)
    detail = f"{name}: {cached}"
    if missing:
        detail = f"{name} would be fetched from the hub: its cache lacks {', '.join(missing[:3])}"
    download = f"hf download {name}"
    if revision:
        download += f" --revision {revision}"
    advice = f"where there is a network: {download}; carry HF_HOME, or the folder, to this machine"
    return checked(title, not missing, detail, advice, "fail")


def missing_files(folder: Path | None, key: str) -> list[str]:
    if folder is None:
        return ["config.json"]
    needed = sorted(set(read_index(folder).values())) or ["*.safetensors"]
    if key == "model":
        needed.append("tokenizer.json")
    return [name for name in needed if not any(folder.glob(name))]


def variable(name: str, expected: str, otherwise: str) -> Finding:
    value = os.environ.get(name)
    return checked(f"offline: {name}", value == expected, f"{name}={value or ''}", f"export {name}={expected}: {otherwise}")
