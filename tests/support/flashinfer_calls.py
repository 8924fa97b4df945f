"""FlashInfer's two entry points, pinned, and a kernel behind them that is as strict as a GPU is unforgiving.

    SIGNATURES        parameters and defaults of both functions, in order, by version (read from the published wheels)
    DECODE_FFI ...    names of what the Python front end passes to the compiled launcher, by position (0.7.1 to 0.7.2.post1)
    XQA_FFI           the same for xqa's launcher, which serves decode rows where there is no trtllm-gen (0.7.2.post1)
    KernelStandIn     answers in fp64 what a launcher would compute; refuses what a kernel would take for something else

The stand-in reads as the kernels do: whole steps of 256 keys, from the first one that a window reaches; every page id in them must
be one of the pool's. A value that is masked is multiplied by zero, so NaN there shows.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.rank.attention.trtllm import FlashInfer, Kernels, load_for

STEP_KEYS = 256
PROCESSORS = 148  # of a B200
_DECODE_070 = (
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0 window_left=-1 out=None "
    "out_dtype=None o_sf_scale=None o_sf_vec_size=None sinks=None kv_layout='HND' enable_pdl=None backend='auto' q_len_per_req=1 "
    "o_scale=1.0 mask=None max_q_len=None cum_seq_lens_q=None skip_softmax_threshold_scale_factor=None kv_cache_sf=None "
    "uses_shared_paged_kv_idx=True lse=None return_lse=False bmm1_scale_log2=None multi_ctas_kv_counter_buffer=None "
    "enable_block_sparse_attention=False cp_world=1 cp_rank=0 causal_seqlens_kv_global=None bf16q_fp8kv_transform_mode=None"
)
_CONTEXT_070 = (
    "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size cum_seq_lens_q "
    "cum_seq_lens_kv window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None kv_layout='HND' enable_pdl=None "
    "sinks=None kv_cache_sf=None skip_softmax_threshold_scale_factor=None uses_shared_paged_kv_idx=True causal=True lse=None "
    "return_lse=False multi_ctas_kv_counter_buffer=None use_fp16_softmax=None uses_spcompress=None"
)
_DECODE_071 = _DECODE_070 + " request_order=None request_order_plan=None"
_CONTEXT_071 = _CONTEXT_070 + " backend='trtllm-gen'"
SIGNATURES: Mapping[str, tuple[str, str]] = {
    "0.7.0.post1": (_DECODE_070, _CONTEXT_070),
    "0.7.1": (_DECODE_071, _CONTEXT_071),
    "0.7.2": (_DECODE_071, _CONTEXT_071),
    "0.7.2.post1": (_DECODE_071, _CONTEXT_071),
}
_FFI = (
    "out out_scale_factor query key_cache value_cache workspace_buffer multi_ctas_kv_counter_buffer block_tables seq_lens "
    "max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale o_sf_vec_size o_sf_start_index batch_size window_left "
)
DECODE_FFI = (
    _FFI + "sparse_mla_top_k sm_count enable_pdl workspace_size attention_sinks cum_seq_lens_q key_block_scales value_block_scales "
    "skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx lse lse_scale lse_stride_tokens lse_stride_heads "
    "enable_block_sparse_attention sparse_mla_top_k_lens bf16q_fp8kv_transform_mode use_fp16_softmax"
).split()
CONTEXT_FFI = (
    _FFI + "cum_seq_lens_q cum_seq_lens_kv sm_count enable_pdl workspace_size attention_sinks key_block_scales value_block_scales "
    "skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx use_fp16_softmax uses_spcompress is_causal lse lse_scale "
    "lse_stride_tokens lse_stride_heads"
).split()
_XQA = (
    "run_sm90_fp8_mha sm_count num_kv_heads sliding_win_size q_scale output rcp_out_scale query sinks k_cache v_cache k_sf_cache "
    "v_sf_cache page_table max_seq_len seq_lens batch_size kv_scale semaphores workspace_buffer enable_pdl q_seq_len "
    "q_cu_seq_lens mask"
)
XQA_FFI = _XQA.split()
XQA_SEMAPHORES = 8 << 20  # bytes at the workspace's beginning


def signature(text: str) -> inspect.Signature:
    """The signature that a line of `SIGNATURES` describes."""
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in text.split():
        name, _, default = word.partition("=")
        value = eval(default, {}) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(parameters)


@dataclass
class KernelStandIn:
    """`calls` lists what each launch was given, by name. Results are rounded once, to out's dtype."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def trtllm_paged_attention_decode(self, *arguments: Any) -> None:
        """The compiled launcher's decode entry point."""
        given = dict(zip(DECODE_FFI, arguments, strict=True))
        assert given["sparse_mla_top_k"] == 0
        assert given["cum_seq_lens_q"] is None
        assert given["query"].shape[0] == given["batch_size"] * given["max_q_len"]
        starts = torch.arange(given["batch_size"] + 1) * given["max_q_len"]
        self._run(given, starts.tolist())

    def trtllm_paged_attention_context(self, *arguments: Any) -> None:
        """The compiled launcher's context entry point."""
        given = dict(zip(CONTEXT_FFI, arguments, strict=True))
        assert given["is_causal"] is True
        starts, keys = given["cum_seq_lens_q"], given["cum_seq_lens_kv"]
        for sums in (starts, keys):
            assert sums.dtype == torch.int32
            assert sums.shape == (given["batch_size"] + 1,)
        assert torch.equal(keys.diff(), given["seq_lens"])
        assert int(starts[-1]) == given["query"].shape[0]
        assert int(starts.diff().max()) <= given["max_q_len"]
        self._run(given, starts.tolist())

    def xqa(self, *arguments: Any) -> None:
        """xqa's compiled launcher: one query a row; the caches come as [pages, page, kv_heads, d]."""
        asked = dict(zip(XQA_FFI, arguments, strict=True))
        query, lengths = asked["query"], asked["seq_lens"]
        assert query.shape[1] == lengths.shape[1] == asked["q_seq_len"] == 1, "a beam, or more queries than one"
        assert query.is_contiguous()
        assert not asked["run_sm90_fp8_mha"]
        assert asked["max_seq_len"] == asked["page_table"].shape[1] * asked["k_cache"].shape[-3]
        assert asked["semaphores"].nbytes == XQA_SEMAPHORES
        assert not asked["semaphores"].any(), "semaphores are zero between launches"
        assert asked["workspace_buffer"].nbytes > 0
        assert asked["rcp_out_scale"] == 1.0
        for name in ("sinks", "k_sf_cache", "v_sf_cache", "q_cu_seq_lens", "mask"):
            assert asked[name] is None, name
        given = {
            "query": query[:, 0],
            "out": asked["output"][:, 0],
            "key_cache": asked["k_cache"].transpose(-3, -2),
            "value_cache": asked["v_cache"].transpose(-3, -2),
            "block_tables": asked["page_table"],
            "seq_lens": lengths[:, 0],
            "max_kv_len": asked["max_seq_len"],
            "max_q_len": 1,
            "batch_size": asked["batch_size"],
            "window_left": asked["sliding_win_size"] - 1 if asked["sliding_win_size"] else -1,
            "bmm1_scale": asked["q_scale"] * asked["kv_scale"] * query.shape[-1] ** -0.5,
            "bmm2_scale": asked["kv_scale"],
            "enable_pdl": asked["enable_pdl"],
        }
        assert given["key_cache"].shape[1] == asked["num_kv_heads"]
        self._answer(given, list(range(given["batch_size"] + 1)))

    def _run(self, given: dict[str, Any], starts: list[int]) -> None:
        self._check_scratch(given)
        self._answer(given, starts)

    def _answer(self, given: dict[str, Any], starts: list[int]) -> None:
        self.calls.append(given)
        self._check(given)
        tables, lengths = given["block_tables"], given["seq_lens"].tolist()
        for row, length in enumerate(lengths):
            mine = slice(starts[row], starts[row + 1])
            given["out"][mine] = self._row(given, given["query"][mine].double(), tables[row], length).to(given["out"].dtype)

    def _check(self, given: dict[str, Any]) -> None:
        tables, lengths, query = given["block_tables"], given["seq_lens"], given["query"]
        assert tables.dtype == lengths.dtype == torch.int32
        assert tables.is_contiguous(), "the launcher takes the width for the row stride"
        assert lengths.is_contiguous()
        assert tables.shape[0] == lengths.shape[0] == given["batch_size"]
        assert 1 <= int(lengths.min()) <= int(lengths.max()) <= given["max_kv_len"], "another kernel would be chosen"
        assert given["max_kv_len"] <= tables.shape[1] * given["key_cache"].shape[2], "a bound beyond the table"
        assert tables.shape[1] * given["key_cache"].shape[2] % STEP_KEYS == 0, "the last step of keys reads past a row"
        assert given["out"].dtype == query.dtype == given["key_cache"].dtype, "the kernel is chosen by the query's"
        assert given["window_left"] >= -1
        assert given["key_cache"].stride() == given["value_cache"].stride(), "V's strides are taken from K"
        assert given["key_cache"].stride(-1) == query.stride(-1) == 1
        assert given["out"].is_contiguous()
        for name in ("bmm1_scale", "bmm2_scale"):
            assert isinstance(given[name], float), f"{name}: a tensor costs a launch each call"

    def _check_scratch(self, given: dict[str, Any]) -> None:
        """What trtllm-gen's launcher is given beside rows and pages."""
        assert given["uses_shared_paged_kv_idx"] is True
        query, workspace, counters = (given[name] for name in ("query", "workspace_buffer", "multi_ctas_kv_counter_buffer"))
        assert given["workspace_size"] == workspace.numel() * workspace.element_size()
        assert not counters.any(), "counters are zero between launches"
        needed = max(given["batch_size"] * query.shape[1], PROCESSORS)
        assert counters.numel() * counters.element_size() >= 4 * (-(-needed // 8) * 8)
        for name in ("out_scale_factor", "attention_sinks", "key_block_scales", "value_block_scales", "lse", "use_fp16_softmax"):
            assert given[name] is None, name
        assert given["skip_softmax_threshold_scale_factor"] is None

    def _row(self, given: dict[str, Any], query: Tensor, table: Tensor, length: int) -> Tensor:
        """query fp64 [n, heads, d], the last n of `length` keys."""
        keys_cache, values_cache = given["key_cache"], given["value_cache"]
        pages, kv_heads, page, d = keys_cache.shape
        window = given["window_left"] + 1 or 1 << 40
        positions = torch.arange(length - len(query), length)
        first = max(0, int(positions[0]) - window + 1) // STEP_KEYS * STEP_KEYS
        last = min(-(-length // STEP_KEYS) * STEP_KEYS, len(table) * page)
        ids = table[first // page : last // page].long()
        assert 0 <= int(ids.min()) <= int(ids.max()) < pages, f"a page id that the pool does not have: {ids.tolist()}"
        assert length <= len(table) * page, "reads past the table"
        k, v = (side[ids].double().transpose(1, 2).reshape(-1, kv_heads, d) for side in (keys_cache, values_cache))
        group = query.shape[1] // kv_heads
        k, v = (side.repeat_interleave(group, 1) for side in (k, v))
        keys = torch.arange(first, last)
        seen = (keys <= positions[:, None]) & (keys > positions[:, None] - window)
        scores = torch.einsum("qhd,khd->hqk", query, k.nan_to_num(0.0)) * given["bmm1_scale"]
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v) * given["bmm2_scale"]


def pinned(version: str, kernel: KernelStandIn, kernels: Kernels = "trtllm-gen") -> FlashInfer:
    """FlashInfer of `version` without FlashInfer: its signatures, and behind them what its front end does with our arguments."""

    def front(text: str, launch: Callable[..., None], names: list[str]) -> Callable[..., None]:
        parameters = signature(text)

        def call(*positional: Any, **named: Any) -> None:
            bound = parameters.bind(*positional, **named)
            bound.apply_defaults()
            launch(*_positional(bound.arguments, names))

        call.__signature__ = parameters  # type: ignore[attr-defined]
        return call

    decode, context = SIGNATURES[version]
    return FlashInfer(
        kernels,
        front(decode, kernel.trtllm_paged_attention_decode, DECODE_FFI),
        front(context, kernel.trtllm_paged_attention_context, CONTEXT_FFI),
    )


def _positional(given: Mapping[str, Any], names: list[str]) -> list[Any]:
    """What the front end passes on, in the launcher's order."""
    k, v = given["kv_cache"].unbind(dim=1)
    q_len = given.get("q_len_per_req")
    known = dict(given) | {
        "out_scale_factor": None,
        "key_cache": k,
        "value_cache": v,
        "max_kv_len": given["max_seq_len"] if q_len else given["max_kv_len"],
        "max_q_len": q_len or given["max_q_len"],
        "batch_size": given["query"].shape[0] // q_len if q_len else given["batch_size"],
        "o_sf_start_index": 0,
        "sparse_mla_top_k": 0,
        "sm_count": PROCESSORS,
        "workspace_size": given["workspace_buffer"].numel() * given["workspace_buffer"].element_size(),
        "attention_sinks": given["sinks"],
        "key_block_scales": None,
        "value_block_scales": None,
        "lse_scale": 1.0,
        "lse_stride_tokens": 0,
        "lse_stride_heads": 0,
        "sparse_mla_top_k_lens": None,
        "use_fp16_softmax": None,
        "bf16q_fp8kv_transform_mode": 0,
        "is_causal": given.get("causal"),
    }
    return [known[name] for name in names]


def real(kernel: KernelStandIn, patch: pytest.MonkeyPatch, kernels: Kernels = "trtllm-gen") -> FlashInfer:
    """The installed FlashInfer's own front end, with `kernel` in place of its compiled launchers. Skips where there is none."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed (make install-gpu): its front end is tested where it is")
    patch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    found = load_for(kernels, download=False)
    import flashinfer.decode
    import flashinfer.prefill

    xqa = importlib.import_module("flashinfer.xqa")  # the package names a function so, too
    for module in (flashinfer.decode, flashinfer.prefill, xqa):
        patch.setattr(module, "get_trtllm_gen_fmha_module", lambda: kernel, raising=module is not xqa)
        patch.setattr(module, "get_device_sm_count", lambda _: PROCESSORS)
    patch.setattr(xqa, "get_compute_capability", lambda _: (9, 0))
    patch.setattr(xqa, "get_xqa_module", lambda *_: kernel)
    return found
