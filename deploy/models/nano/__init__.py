"""The embedded nano models, trained on exercises (tests/nano) and kept in `trained/`."""

from pathlib import Path

TRAINED = Path(__file__).parent / "trained"  # a checkpoint folder a member


def trained() -> list[str]:
    """The members that have a trained checkpoint."""
    return sorted(folder.name for folder in TRAINED.iterdir() if folder.is_dir())
