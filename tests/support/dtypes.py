"""The dtypes that ops are tested in."""

import pytest
import torch

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
