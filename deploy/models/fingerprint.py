"""What OpenAI calls `system_fingerprint`: a change of build, checkpoint or setup changes it, for those who send seeds."""

import hashlib
from pathlib import Path


def fingerprint(folder: Path, *setup: str) -> str:
    """Of the checkpoint in `folder` (its config, its tensors' files by name and size) and `setup`. Reads no weights."""
    digest = hashlib.sha256()
    sizes = [f"{path.name} {path.stat().st_size}" for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    for part in ((folder / "config.json").read_bytes(), *(text.encode() for text in (*sizes, *setup))):
        digest.update(hashlib.sha256(part).digest())
    return f"fp_{digest.hexdigest()[:12]}"
