"""The engine's model in bf16 over ranks on GPUs of their own: NCCL and symmetric memory."""

import pytest

from tests.gpu.exactness import DEVICE, MEMBERS, RANKS, case, compare, exact

pytestmark = pytest.mark.gpu4


@pytest.mark.parametrize("member", [member for member in MEMBERS if member != "26b-a4b"])  # its router has near ties
def test_nano_in_fp32(member: str) -> None:
    """In fp32 each dense nano checkpoint is transformers' over the ranks; one wrong page or lost all-reduce is 100 times off."""
    exact(member, RANKS, case(f"random:{member}", 4, 400, 120, 24), 120.0)


@pytest.mark.parametrize("member", MEMBERS)
def test_nano(member: str) -> None:
    """Each nano checkpoint is as near to fp32 as transformers' bf16 is, all ranks holding the same bits after every step."""
    compare(member, RANKS, case(f"random:{member}", 8, 400, 120, 24), 120.0, (DEVICE, DEVICE))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_31b_shape() -> None:
    """The 31B shape with random weights, beyond its window; its fp32 judge fills one GPU."""
    compare("31b", RANKS, case("dummy:31b", 3, 1300, 48, 16), 280.0, (f"{DEVICE}:0", f"{DEVICE}:1"))
