"""The engine's model in bf16 on one GPU."""

import pytest

from tests.gpu.exactness import DEVICE, MEMBERS, case, compare, exact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("member", [member for member in MEMBERS if member != "26b-a4b"])  # its router has near ties
def test_nano_in_fp32(member: str) -> None:
    """In fp32 each dense nano checkpoint is transformers' on one GPU; one wrong page is 100 times off."""
    exact(member, 1, case(f"random:{member}", 4, 400, 120, 24), 120.0)


@pytest.mark.parametrize("member", MEMBERS)
def test_nano(member: str) -> None:
    """Each nano checkpoint in bf16 is as near to fp32 as transformers' bf16 is."""
    compare(member, 1, case(f"random:{member}", 8, 400, 120, 24), 120.0, (DEVICE, DEVICE))
