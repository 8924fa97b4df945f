"""The engine's model in bf16 on one GPU."""

import pytest

from tests.gpu.exactness import DEVICE, MEMBERS, case, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("member", MEMBERS)
def test_nano(member: str) -> None:
    """Each nano checkpoint in bf16 is as near to fp32 as transformers' bf16 is."""
    compare(member, 1, case(f"nano:{member}", 8, 400, 120, 24), 120.0, (DEVICE, DEVICE))
