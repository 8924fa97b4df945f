"""The generated reference of metrics."""

import pytest

from dashboards.metrics import DISCOVERY_METRICS, ENGINE
from tests.support.monitoring.metrics_reference import PATH, reference

pytestmark = pytest.mark.pure


def test_the_committed_reference_is_current() -> None:
    """`python -m tests.support.monitoring.metrics_reference` would change nothing."""
    assert PATH.read_text(encoding="utf-8") == reference()


def test_every_row_is_in_it() -> None:
    """With its help; and a row that is not in the table is not."""
    page = reference()
    for row in (*ENGINE, *DISCOVERY_METRICS):
        assert f"| `{row.name}` | {row.kind} |" in page
        assert row.help in page
    assert "quartet_unheard_of" not in page
