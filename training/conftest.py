"""What these tests share with those in `tests/`: the limits of a tier, and the nano checkpoints."""

from tests.conftest import nano, pytest_collection_modifyitems, pytest_configure, pytest_runtest_setup

__all__ = ["nano", "pytest_collection_modifyitems", "pytest_configure", "pytest_runtest_setup"]
