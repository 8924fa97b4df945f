"""The embedded nano models, trained on exercises (tests/nano), in `trained/`."""

from pathlib import Path

TRAINED = Path(__file__).parent / "trained"  # a checkpoint folder a member


def trained() -> list[str]:
    return sorted(folder.name for folder in TRAINED.iterdir() if folder.is_dir())
