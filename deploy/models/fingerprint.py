"""OpenAI's `system_fingerprint`, which changes with build, checkpoint or setup."""

import hashlib
from pathlib import Path


def fingerprint(folder: Path, *setup: str) -> str:
    """From config, names and sizes of weight files, and `setup`. Reads no weights."""
    digest = hashlib.sha256()
    sizes = [f"{path.name} {path.stat().st_size}" for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    for part in ((folder / "config.json").read_bytes(), *(text.encode() for text in (*sizes, *setup))):
        digest.update(hashlib.sha256(part).digest())
    return f"fp_{digest.hexdigest()[:12]}"
