"""FlashInfer's two calls for NVFP4, pinned, and launchers under them that are as strict as the compiled ones.

    SIGNATURES    parameters and defaults of both, in order, by version (read from the published wheel)
    Fp4Kernels    computes in fp64 from the layouts that the CUDA sources read and write

The compiled launchers see bare pointers: what they check is checked here, and so is what they take on trust.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.rank.nvfp4 import Fp4Calls, load_calls
from tests.support.engine.fp4 import codes, numbers
from tests.support.flashinfer_calls import signature

_QUANTISE_072 = (
    "a a_global_sf sfLayout=0 do_shuffle=False sf_vec_size=16 enable_pdl=None backend='cuda' per_token_activation=False "
    "expanded_idx_to_permuted_idx=None out_scale=None nvfp4_4over6=..."
)
_MULTIPLY_072 = (
    "a b a_descale b_descale alpha=None out_dtype=None out=None block_size=16 use_8x4_sf_layout=False backend='auto' "
    "use_nvfp4=True enable_pdl=True"
)
SIGNATURES: Mapping[str, tuple[str, str]] = {"0.7.2.post1": (_QUANTISE_072, _MULTIPLY_072)}
NEWEST = "0.7.2.post1"
_TILES_128X4 = 0


def place(rows: int, columns: int) -> Tensor:
    """Where the scale of each row and group lies, int64 [rows, columns]: `get_sf_out_offset_128x4` of the CUDA sources."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    tiles = -(-columns // 4)
    return row // 128 * tiles * 512 + column // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def packed(code: Tensor) -> Tensor:
    """Codes [T, n] -> uint8 [T, n / 2], the first in the low bits."""
    return (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8)


@dataclass
class Fp4Kernels:
    """calls: the shapes and alpha of each product."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def nvfp4_quant_and_per_token_scale(
        self, x: Tensor, scale_inv: float, out: Tensor, scale: Tensor, factor: Tensor, index: None, layout: int, recipe: int
    ) -> None:
        rows, columns = x.shape
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.is_contiguous()
        assert columns % 16 == 0
        assert scale_inv == pytest.approx(1 / (6 * 448), rel=1e-6), "the kernel takes any, and scales would saturate"
        assert index is None
        assert (layout, recipe) == (_TILES_128X4, 0), "another layout, or another recipe"
        assert (out.shape, out.dtype) == ((rows, columns // 2), torch.uint8)
        assert (factor.shape, factor.dtype) == ((rows,), torch.float32)
        assert scale.shape == (-(-rows // 128) * 128, -(-(columns // 16) // 4) * 4)
        assert scale.dtype == torch.uint8
        code, scale_code, factor_made = codes(x)
        out.copy_(packed(code))
        factor.copy_(factor_made)
        scale.view(-1)[place(rows, columns // 16)] = scale_code.to(torch.uint8)

    def fp4_gemm_tactic_num(self) -> int:
        return 32

    def fp4_gemm(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, out: Tensor, workspace: Tensor, tactic: int
    ) -> None:
        for tensor in (a, b, a_scale, b_scale):
            assert tensor.dtype == torch.uint8
            assert tensor.is_contiguous()
        rows, outputs, columns = len(a), len(b), 2 * a.shape[1]
        assert b.shape[1] == a.shape[1]
        assert columns % 32 == 0, "the launcher's alignment"
        assert outputs % 32 == 0, "the launcher's alignment"
        assert (alpha.dtype, alpha.numel()) == (torch.float32, 1), "the launcher reads one number"
        assert out.dtype in (torch.bfloat16, torch.float16)
        assert out.shape == (rows, outputs)
        assert out.is_contiguous()
        assert workspace.dtype == torch.uint8
        assert tactic == -1, "a tactic was tuned"
        operands = [self._numbers(a, a_scale), self._numbers(b, b_scale)]
        out.copy_(operands[0] @ operands[1].t() * alpha.double())
        self.calls.append({"rows": rows, "outputs": outputs, "columns": columns, "alpha": alpha.item()})

    def _numbers(self, values: Tensor, scale: Tensor) -> Tensor:
        rows, groups = len(values), values.shape[1] // 8
        assert scale.numel() == -(-rows // 128) * 128 * -(-groups // 4) * 4, "the kernel reads whole tiles"
        code = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
        return numbers(code, scale.view(-1)[place(rows, groups)].long())


def pinned(version: str, kernels: Fp4Kernels) -> Fp4Calls:
    """FlashInfer of `version` without FlashInfer: its signatures, and what its front end does with our arguments."""
    quantise_signature, multiply_signature = (signature(text) for text in SIGNATURES[version])

    def quantise(*positional: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = _bound(quantise_signature, positional, named)
        assert given["per_token_activation"] is True
        assert (given["backend"], given["sf_vec_size"], given["do_shuffle"]) == ("cuda", 16, False)
        assert given["out_scale"] is None
        x = given["a"]
        rows, columns = x.shape
        values = x.new_empty((rows, columns // 2), dtype=torch.uint8)
        scale = x.new_zeros((-(-rows // 128) * 128, -(-(columns // 16) // 4) * 4), dtype=torch.uint8)
        factor = x.new_empty((rows,), dtype=torch.float32)
        recipe = -1 if given["nvfp4_4over6"] is ... else 0
        kernels.nvfp4_quant_and_per_token_scale(x, given["a_global_sf"], values, scale, factor, None, given["sfLayout"], recipe)
        return values, scale, factor

    def multiply(*positional: Any, **named: Any) -> Tensor:
        given = _bound(multiply_signature, positional, named)
        assert given["backend"] == "cutlass"
        out = torch.empty((len(given["a"]), given["b"].shape[1]), dtype=given["out_dtype"])
        scales = [scale.view(torch.uint8) for scale in (given["a_descale"], given["b_descale"])]
        workspace = torch.empty(1, dtype=torch.uint8)
        kernels.fp4_gemm(given["a"], given["b"].T, scales[0], scales[1].T, given["alpha"], out, workspace, -1)
        return out

    for call, made in ((quantise, quantise_signature), (multiply, multiply_signature)):
        call.__signature__ = made  # type: ignore[attr-defined]
    return Fp4Calls(quantise, multiply)


def _bound(made: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    bound = made.bind(*positional, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


@contextmanager
def real(kernels: Fp4Kernels, patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Iterator[Fp4Calls]:
    """The installed FlashInfer's own front end on `kernels`, as on a GPU of this capability. Skips where there is none."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed (make install-gpu): its front end is tested where it is")
    found = load_calls()
    import flashinfer.gemm.gemm_base
    import flashinfer.quantization.fp4_quantization  # noqa: F401

    quantisation, gemm = (sys.modules[f"flashinfer.{name}"] for name in ("quantization.fp4_quantization", "gemm.gemm_base"))
    architecture = f"sm{capability[0]}{capability[1]}"
    built = SimpleNamespace(build_and_load=lambda: kernels)
    patch.setattr(quantisation, f"gen_fp4_quantization_{architecture}_module", lambda: built)
    patch.setattr(gemm, f"gen_gemm_{architecture}_module_cutlass_fp4", lambda: built)
    for module in (quantisation, gemm, sys.modules["flashinfer.utils"]):
        patch.setattr(module, "get_compute_capability", lambda _: capability)
    patch.setattr(Tensor, "cuda", lambda self: self)
    caches = [quantisation.get_fp4_quantization_module, getattr(gemm, f"get_gemm_{architecture}_module_cutlass_fp4")]
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()
