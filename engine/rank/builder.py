"""Builds model, inboxes, KV cache and runner of a rank, for workers, benchmarks and `quartet plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import torch

from engine.config import EngineConfig
from engine.geometry import Geometry, vocab_share
from engine.media_memory import MediaReader
from engine.memory import inbox_rows, kv_budget
from engine.protocol import MediaKind
from engine.rank.adapter_stacks import has_adapters
from engine.rank.adapter_store import AdapterStore, load_adapters
from engine.rank.attention import FailedChecks, attention_backend
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import SoftTokens
from engine.rank.checkpoints import Checkpoint, checkpoints_of
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.kv_scales import read_kv_scales
from engine.rank.load.loader import with_head
from engine.rank.load.random_fill import dummy
from engine.rank.load.slices import allocate
from engine.rank.models.architecture import MediaEncoder, Model
from engine.rank.models.assistant import Assistant
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes, Parallel, make_inboxes
from engine.rank.runner import Runner
from engine.rank.sampler import Sampler
from engine.rank.slots import SlotState
from engine.rank.stages.draft_stage import DraftStage
from engine.rank.stages.encode_stage import EncodeStage
from engine.rank.stages.forward_stage import ForwardStage
from engine.rank.stages.report_stage import ReportStage
from engine.rank.stages.sample_stage import SampleStage
from engine.rank.start_checks import check_attention, check_inboxes, check_kernels, check_products, is_untried
from engine.rank.step import StepBuffers
from engine.step_shapes import StepShapes, sequence_rows
from kernels.table_check import COPIED_ENTRY


@dataclass(frozen=True)
class Rank:
    """A rank with loaded weights. failed_checks: parts of attention; fallbacks: sentences; adapters: set if some may be loaded
    while it serves."""

    config: EngineConfig
    geometry: Geometry
    device: torch.device
    parallel: Parallel
    model: Model
    inboxes: Inboxes | None
    failed_checks: FailedChecks
    fallbacks: tuple[str, ...]
    drafter: Assistant | None
    encoders: Mapping[MediaKind, MediaEncoder]
    adapters: AdapterStore | None = None
    kv_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by layer
    media: int = -1  # descriptor of the media memory

    @property
    def weight_bytes(self) -> int:
        models = {self.model, self.drafter, *self.encoders.values()}  # an encoder may be of two kinds of media
        return sum(parameter.nbytes for model in models if model is not None for parameter in model.parameters())


def load_rank(config: EngineConfig, parallel: Parallel, device: torch.device, *, checked: bool = True, media: int = -1) -> Rank:
    """Load this rank's shard of `config.model`; empty on meta. checked: run `start_checks`. A collective call."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share the cores; results must not depend on how many there are
    dtype = getattr(torch, config.dtype)
    if device.type == "meta":
        source = "empty"
    else:
        source = config.load_format
    text, drafter, encoders = checkpoints_of(config)
    if source == "safetensors":
        text = replace(text, geometry=with_head(text.geometry, text.tensors, text.folder))
    new_gpu = checked and is_untried(device)
    if new_gpu:
        check_kernels(device)
    failed_checks, fallbacks = check_attention(parallel, config, device) if checked else ((), ())
    model: Model = _filled(text, source, parallel, dtype, device)
    if checked:
        check_products(model)
    if config.head == "fp8":
        model.head.add_fp8_copy()
    adapters = load_adapters(
        model, text.tensors, config.adapters, slots=config.max_adapters, max_rank=config.max_rank
    )
    assistant = None if drafter is None else _filled(drafter, source, parallel, dtype, device)
    made = {each: _filled(each, source, dtype, device) for each in dict.fromkeys(encoders.values())}
    of_media = {kind: made[each] for kind, each in encoders.items()}
    inboxes = _inboxes(config, text.geometry, parallel, dtype)
    if new_gpu and inboxes is not None:
        inboxes.allreduce.wait_at_most(config.boot_timeout_s)  # another rank's compiler may take long
        check_inboxes(parallel, inboxes, text.geometry.hidden, device, dtype)
    has_scales = source == "safetensors" and config.kv_dtype == "fp8"
    if has_scales:
        scales = read_kv_scales(text, parallel, device)
    else:
        scales = {}
    return Rank(
        config, text.geometry, device, parallel, model, inboxes, failed_checks, fallbacks, assistant, of_media,
        adapters, scales, media,
    )


def _filled(checkpoint: Checkpoint, source: str, *arguments: object) -> Any:
    made = resolve_name(checkpoint.model)(checkpoint.geometry, *arguments)
    if source == "safetensors":
        resolve_name(checkpoint.loader)(made, checkpoint.tensors, checkpoint.folder, checkpoint.weights)
    elif source == "dummy":
        dummy(made, checkpoint.tensors, weights=checkpoint.weights)
    else:
        allocate(made, checkpoint.tensors, checkpoint.weights)
    return made


def _inboxes(config: EngineConfig, geometry: Geometry, parallel: Parallel, dtype: torch.dtype) -> Inboxes | None:
    rows = inbox_rows(config, geometry)
    own = sequence_rows(config, geometry)
    return make_inboxes(parallel, rows, geometry.summed_width, dtype, own, shares_rows=not geometry.residual_is_read)


def kv_bytes(rank: Rank) -> int:
    free, total = torch.cuda.mem_get_info(rank.device) if rank.device.type == "cuda" else (0, 0)
    return kv_budget(rank.config, total, total - free)


def kv_cache(
    config: EngineConfig, pages: Sequence[int], device: torch.device, scales: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> KVCache:
    slots = config.max_seqs + 1  # one for padding rows
    groups = zip(config.kv_groups, pages, strict=True)
    made = KVCache([GroupCache(group, count, slots, config.max_len, device, config.widest) for group, count in groups])
    for cache in made:
        cache.scales.update((layer, scales[layer]) for layer in cache.layers if layer in scales)
    return made


def build(rank: Rank, pages: Sequence[int], shapes: StepShapes | None = None) -> Runner:
    return build_runner(rank, kv_cache(rank.config, pages, rank.device, rank.kv_scales), shapes or StepShapes.of(rank.config))


def build_runner(rank: Rank, cache: KVCache, shapes: StepShapes) -> Runner:
    config = rank.config
    slots = _slots(rank, cache)
    pages = PageCheck(slots) if config.debug_pages else None
    check = None if pages is None else partial(pages.compare, COPIED_ENTRY)

    def attention(geometry: Geometry, width: int) -> AttentionBackend:
        return attention_backend(config, geometry, cache, config.tp, shapes.sequences, check, width, rank.failed_checks)

    inputs = _inputs(rank, slots, shapes)
    forward = ForwardStage(rank.model, attention(rank.geometry, config.widest), inputs, rank.inboxes, pages)
    sampler = Sampler(rank.parallel, rank.geometry.vocab, rank.geometry.softcap, config.suppress, rank.device)
    sample = SampleStage(rank.model, sampler, slots, rank.inboxes)
    draft = None
    if rank.drafter is not None:
        draft = DraftStage(rank.drafter, config.widest - 1, attention(rank.drafter.geometry, 1), inputs, sample)
    encode = EncodeStage(rank.encoders, rank.device, rank.parallel, config.encoder_host_bytes, MediaReader(rank.media))
    results = config.widest * (shapes.sequences[-1] + shapes.prefill)
    report = ReportStage(results, rank.device, pages, encode, debug_hash=config.debug_hash)
    capturable = rank.device.type == "cuda" and config.graphs
    return Runner(shapes, slots, inputs, forward, sample, draft, encode, report, capturable, has_adapters(rank.model))


def _slots(rank: Rank, cache: KVCache) -> SlotState:
    config = rank.config
    share = vocab_share(rank.geometry.vocab, rank.parallel.size)
    ids = range(rank.parallel.rank * share, (rank.parallel.rank + 1) * share)
    return SlotState(config.max_seqs, config.max_len, cache, ids, rank.device, config.widest - 1)


def _inputs(rank: Rank, slots: SlotState, shapes: StepShapes) -> StepBuffers:
    soft = None
    if rank.encoders:
        rows = torch.full((shapes.padded_prompts,), -1, device=rank.device)
        values = torch.zeros((len(rows), rank.geometry.hidden), dtype=rank.model.dtype, device=rank.device)
        soft = SoftTokens(rows, values)
    return StepBuffers(slots, rank.model.frequencies, shapes, soft)
