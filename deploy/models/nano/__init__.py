"""The embedded nano models and their adapters, trained on exercises (tests/nano)."""

from pathlib import Path

POLITE = "polite"  # the adapter in each of them
TRAINED = Path(__file__).parent / "trained"  # a checkpoint folder a member


def polite() -> dict[str, Path]:
    return {member: TRAINED / member / POLITE for member in trained() if (TRAINED / member / POLITE).is_dir()}


def trained() -> list[str]:
    return sorted(folder.name for folder in TRAINED.iterdir() if folder.is_dir())
