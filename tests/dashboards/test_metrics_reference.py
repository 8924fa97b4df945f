"""The generated reference of metrics."""

import pytest

from tests.support.monitoring.metrics_reference import PATH, reference

pytestmark = pytest.mark.pure


def test_the_committed_reference_is_current() -> None:
    """`python -m tests.support.monitoring.metrics_reference` would change nothing."""
    assert PATH.read_text(encoding="utf-8") == reference()
