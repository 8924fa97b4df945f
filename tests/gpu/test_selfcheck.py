"""Each kernel against plain torch on a GPU, as `quartet doctor --kernels` and a boot on a GPU that nobody tried run it."""

import pytest
import torch

from kernels.selfcheck import CHECKS, Check, failure
from tests.support.dtypes import both_dtypes

pytestmark = pytest.mark.gpu


@both_dtypes
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.what)
@torch.inference_mode()
def test_a_check_holds(check: Check, dtype: torch.dtype) -> None:
    """Planted faults: `tests/kernels/test_selfcheck.py` changes a number of each kernel, and each check fails."""
    assert failure(check, torch.device("cuda"), dtype) is None
