"""Attention by FlashInfer's TensorRT-LLM kernels: trtllm-gen on SM10x; elsewhere xqa, for decode rows only.

FlashInfer passes unchecked bare pointers, so a mistake gives wrong results or a GPU fault: docs/blackwell.md lists its rules. PDL
is off: it was never tried with these kernels.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.trtllm_mha import TRTLLM_MHA
from engine.errors import ConfigError
from engine.geometry import KVGroup, Layer
from engine.rank.attention.base import AttentionParts, Norms, PartSettings, normed_queries
from engine.rank.batch import ForwardBatch
from engine.rank.flashinfer_front import check_arguments
from engine.rank.kv import ROW_TOKENS, GroupCache
from kernels.launch import processors
from kernels.slots import gather_pages

Kernels = Literal["trtllm-gen", "xqa"]
HEAD_DIMS = (256, 512)
WORKSPACE_BYTES = 256 << 20  # splits' partial results: at most about 42 MiB at head dim 512; xqa keeps 8 MiB of semaphores
_MOST_GROUP = {"trtllm-gen": 128, "xqa": 16}  # query heads of a KV head

# What each call is given by name; a FlashInfer that lacks one is refused when it is loaded.
_ARGUMENTS = (
    "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "bmm1_scale", "bmm2_scale", "window_left", "out",
    "kv_layout", "enable_pdl", "multi_ctas_kv_counter_buffer",
)  # fmt: skip
DECODE_ARGUMENTS = (*_ARGUMENTS, "max_seq_len", "backend")
CONTEXT_ARGUMENTS = (*_ARGUMENTS, "max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "causal")


class FlashInfer(NamedTuple):
    kernels: Kernels
    decode: Callable[..., Any]
    context: Callable[..., Any]


def load(device: torch.device, *, download: bool) -> FlashInfer:
    """ConfigError: FlashInfer is missing, or lacks an argument."""
    return load_for("trtllm-gen" if torch.cuda.get_device_capability(device)[0] == 10 else "xqa", download=download)


def load_for(kernels: Kernels, *, download: bool) -> FlashInfer:
    """download: the first call may fetch missing kernels, for up to minutes."""
    if not download:
        os.environ["FLASHINFER_NO_DOWNLOAD"] = "1"
    try:
        import flashinfer
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache as decode
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache as context
    except ImportError as error:
        raise ConfigError(f"attention: {TRTLLM_MHA.name} needs FlashInfer (make install-gpu): {error}") from error
    for call, names in ((decode, DECODE_ARGUMENTS), (context, CONTEXT_ARGUMENTS)):
        check_arguments(f"attention: {TRTLLM_MHA.name}", flashinfer.__version__, call, names)
    return FlashInfer(kernels, decode, context)


class TrtllmScratch:
    """Shared by all calls of a rank, on one stream; zeroed once, and kernels leave the counters
    zero."""

    def __init__(self, flashinfer: FlashInfer, settings: PartSettings, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.flashinfer = flashinfer
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=settings.device)
        counters = max(settings.buckets[-1] * settings.heads, processors(settings.device))
        self.counters = torch.zeros(-(-counters // 8) * 8, dtype=torch.int32, device=settings.device)


@dataclass(frozen=True)
class TableRows:
    """int32: tables [rows, width], lengths [rows], new keys included, at most max_len."""

    tables: Tensor
    lengths: Tensor
    max_len: int


def check_group(group: KVGroup, heads: int, kernels: Kernels) -> None:
    """ConfigError unless the kernels support `group` with `heads` query heads."""
    if group.head_dim not in HEAD_DIMS:
        raise ConfigError(f"attention: {TRTLLM_MHA.name} has no kernels for head dim {group.head_dim}")
    if heads % group.kv_heads or heads // group.kv_heads > _MOST_GROUP[kernels]:
        raise ConfigError(f"attention: {kernels} has no kernels for {heads} query heads on {group.kv_heads} KV heads")


def _arguments(
    scratch: TrtllmScratch, query: Tensor, pool: Tensor, rows: TableRows, group: KVGroup, out: Tensor
) -> dict[str, Any]:
    window_left = -1 if group.window is None else group.window - 1  # keys to the left of the query's own; -1: all
    values = (
        query, pool, scratch.workspace, rows.tables, rows.lengths, 1.0, 1.0, window_left, out,
        "HND", False, scratch.counters,
    )  # fmt: skip
    return dict(zip(_ARGUMENTS, values, strict=True))


def call_decode(scratch: TrtllmScratch, group: KVGroup, query: Tensor, pool: Tensor, rows: TableRows, out: Tensor) -> None:
    """query and out [rows, heads, d]."""
    flashinfer = scratch.flashinfer
    arguments = _arguments(scratch, query, pool, rows, group, out)
    flashinfer.decode(**arguments, max_seq_len=rows.max_len, backend=flashinfer.kernels)


class TrtllmDecode:
    """Decode rows of one token, by tables at fixed addresses. A row's table starts at the first page of its window, which bounds
    lengths.
    """

    def __init__(self, cache: GroupCache, settings: PartSettings, scratch: TrtllmScratch) -> None:
        most = settings.buckets[-1]
        unit = ROW_TOKENS // cache.group.page
        check_group(cache.group, settings.heads, scratch.flashinfer.kernels)
        self._cache = cache
        self._settings = settings
        self._scratch = scratch
        width = -(-cache.read_width // unit) * unit
        self._tables = torch.zeros((most, width), dtype=torch.int32, device=settings.device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=settings.device)

    def prepare(self, block: ForwardBatch) -> TableRows:
        cache = self._cache
        count = len(block.slots)
        rows = TableRows(self._tables[:count], self._lengths[:count], cache.read_width * cache.group.page)
        page = cache.group.page
        window = cache.group.window
        gather_pages(cache.table, block.slots, block.positions, page, window, rows.tables, rows.lengths)
        if self._settings.check is not None:
            self._settings.check(cache.group, rows.tables, block.slots, block.positions, window)
        return rows

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, plan: TableRows, out: Tensor) -> None:
        q, pool = normed_queries(self._cache, self._settings, qkv, layer, norms, block)
        call_decode(self._scratch, self._cache.group, q, pool, plan, out.view(q.shape))


class ChunkRows(NamedTuple):
    """queries and keys int32 [chunks + 1]: running sums; longest: in queries."""

    rows: TableRows
    queries: Tensor
    keys: Tensor
    longest: int


class TrtllmExtend:
    def __init__(self, cache: GroupCache, settings: PartSettings, scratch: TrtllmScratch) -> None:
        check_group(cache.group, settings.heads, scratch.flashinfer.kernels)
        self._cache = cache
        self._settings = settings
        self._scratch = scratch

    def prepare(self, block: ForwardBatch) -> ChunkRows:
        """The chunks' page table rows, zero after their ends, and running sums."""
        assert block.chunk_list is not None
        slots, _, starts, sizes = block.chunk_list[: len(block.chunks)].T.contiguous()
        lengths = starts + sizes
        query_sums, key_sums = (functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)) for counts in (sizes, lengths))
        table = self._cache.table
        page = self._cache.group.page
        begins = torch.arange(0, table.shape[1] * page, page, device=table.device)
        held = table[slots.long()].masked_fill_(begins >= lengths[:, None], 0)  # pages reserved ahead, or of no sequence
        rows = TableRows(held, lengths, table.shape[1] * page)
        if self._settings.check is not None:
            self._settings.check(self._cache.group, held, slots, lengths - 1, None)
        return ChunkRows(rows, query_sums, key_sums, max(chunk.size for chunk in block.chunks))

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, plan: ChunkRows, out: Tensor) -> None:
        cache = self._cache
        tables = plan.rows
        scratch = self._scratch
        q, pool = normed_queries(cache, self._settings, qkv, layer, norms, block)
        scratch.flashinfer.context(
            **_arguments(scratch, q, pool, tables, cache.group, out.view(q.shape)),
            max_q_len=plan.longest,
            max_kv_len=tables.max_len,
            batch_size=len(tables.tables),
            cum_seq_lens_q=plan.queries,
            cum_seq_lens_kv=plan.keys,
            causal=True,
        )


def parts(settings: PartSettings, *, download: bool) -> AttentionParts:
    flashinfer = load(settings.device, download=download)
    scratch = TrtllmScratch(flashinfer, settings)
    return AttentionParts(
        partial(TrtllmDecode, settings=settings, scratch=scratch), partial(TrtllmExtend, settings=settings, scratch=scratch)
    )
