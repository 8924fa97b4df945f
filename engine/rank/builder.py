"""Builds what a rank holds, alike for workers, benchmarks and plans: model, inboxes, KV cache, runner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.audio_geometry import AudioGeometry
from engine.config import EngineConfig
from engine.geometry import Geometry, vocab_share
from engine.media_geometry import MediaGeometry, read_media
from engine.memory import inbox_rows, kv_budget
from engine.protocol import MediaKind
from engine.quantisation import UNQUANTISED, Quantisation, read_quantisation
from engine.rank.attention import FailedChecks, attention_backend
from engine.rank.attention.base import AttentionBackend
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.loader import load, with_head
from engine.rank.load.random_fill import dummy
from engine.rank.load.slices import allocate
from engine.rank.load.tensor_table import TensorTable
from engine.rank.models.architecture import Architecture, MediaEncoder, Model
from engine.rank.models.assistant import Assistant, load_assistant
from engine.rank.models.assistant_geometry import read_assistant
from engine.rank.models.assistant_weights import TENSORS as ASSISTANT_TENSORS
from engine.rank.models.audio import AudioEncoder, AudioTower
from engine.rank.models.clipped import load_encoder
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.rank.models.gemma4 import GEMMA4
from engine.rank.models.vision import Tower, VisionEmbedder
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes, Parallel, make_inboxes
from engine.rank.runner import Runner
from engine.rank.sampler import Sampler
from engine.rank.shard import Shard
from engine.rank.slots import SlotState
from engine.rank.stages.draft_stage import DraftStage
from engine.rank.stages.encode_stage import EncodeStage
from engine.rank.stages.forward_stage import ForwardStage
from engine.rank.stages.report_stage import ReportStage
from engine.rank.stages.sample_stage import SampleStage
from engine.rank.start_checks import check_attention, check_inboxes, check_kernels, is_untried
from engine.rank.step import StepBuffers
from engine.step_shapes import StepShapes, sequence_rows
from engine.vision_geometry import VisionGeometry
from kernels.table_check import COPIED_ENTRY

_ENCODERS: Mapping[tuple[type[MediaGeometry], bool], Callable[..., MediaEncoder]] = {  # by geometry, and whether it is unified
    (VisionGeometry, False): Tower,
    (VisionGeometry, True): VisionEmbedder,
    (AudioGeometry, False): AudioTower,
    (AudioGeometry, True): AudioEncoder,
}


@dataclass(frozen=True)
class Rank:
    """A rank that has loaded its weights. failed_checks: parts of attention; fallbacks: a sentence for each."""

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

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: of the model, of its drafter, and of encoders."""
        models = {self.model, self.drafter, *self.encoders.values()}  # an encoder may be of two kinds of media
        return sum(parameter.nbytes for model in models if model is not None for parameter in model.parameters())


def load_rank(
    config: EngineConfig,
    parallel: Parallel,
    device: torch.device,
    architecture: Architecture = GEMMA4,
    *,
    checked: bool = True,
) -> Rank:
    """Load this rank's shard of `config.model`, filled as `config.load_format` says; on the meta device it stays empty.

    checked: run `start_checks`. Every rank must call it.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share the cores; results must not depend on how many there are
    folder, dtype = Path(config.model), getattr(torch, config.dtype)
    geometry = architecture.read(folder)
    weights = read_quantisation(folder, config.weights)
    source = "empty" if device.type == "meta" else config.load_format
    if source == "safetensors":
        geometry = with_head(geometry, architecture.tensors, folder)
    new_gpu = checked and is_untried(device)
    if new_gpu:
        check_kernels(device)
    failed_checks, fallbacks = check_attention(parallel, config, device) if checked else ((), ())
    model = architecture.build(geometry, parallel, dtype, device)
    reading = partial(load, model, architecture.tensors, folder, weights=weights)
    _fill(model, architecture.tensors, source, reading, weights)
    drafter, encoders = _drafter(config, model, source), _encoders(config, model, source)
    rows, width, shares_rows = inbox_rows(config, geometry), geometry.summed_width, not geometry.residual_is_read
    inboxes = make_inboxes(parallel, rows, width, dtype, sequence_rows(config, geometry), shares_rows=shares_rows)
    if new_gpu and inboxes is not None:
        inboxes.allreduce.wait_at_most(config.boot_timeout_s)  # another rank's compiler may take long
        check_inboxes(parallel, inboxes, geometry.hidden, device, dtype)
    return Rank(config, geometry, device, parallel, model, inboxes, failed_checks, fallbacks, drafter, encoders)


def _drafter(config: EngineConfig, model: Model, source: str) -> Assistant | None:
    """Load the model's assistant, if drafts are asked for, filled as the model is."""
    if config.widest == 1:
        return None
    folder = Path(str(config.mtp.model))
    shape = read_assistant(folder, model.geometry, model.parallel.size)
    drafter = Assistant(shape, model.parallel, model.dtype, model.device)
    _fill(drafter, ASSISTANT_TENSORS, source, partial(load_assistant, drafter, folder))
    return drafter


def _encoders(config: EngineConfig, model: Model, source: str) -> dict[MediaKind, MediaEncoder]:
    """Load what the model's checkpoint has for media, whole on every rank; source: what fills it."""
    folder = Path(config.model)
    made = {}
    shapes = read_media(config)
    for shape in dict.fromkeys(shapes.values()):
        tensors = ENCODER_TENSORS[type(shape)]
        encoder = made[shape] = _ENCODERS[type(shape), shape.unified](shape, model.dtype, model.device)
        _fill(encoder, tensors, source, partial(load_encoder, encoder, tensors, folder))
    return {kind: made[shape] for kind, shape in shapes.items()}


def _fill(
    model: Shard, tensors: TensorTable, source: str, reading: Callable[[], None], weights: Quantisation = UNQUANTISED
) -> None:
    """Fill a model: `reading` does from its checkpoint."""
    if source == "safetensors":
        reading()
    elif source == "dummy":
        dummy(model, tensors, weights=weights)
    else:
        allocate(model, tensors, weights)


def kv_bytes(rank: Rank) -> int:
    """Returns the bytes that this rank may spend on KV pages."""
    free, total = torch.cuda.mem_get_info(rank.device) if rank.device.type == "cuda" else (0, 0)
    return kv_budget(rank.config, total, total - free)


def kv_cache(config: EngineConfig, pages: Sequence[int], device: torch.device) -> KVCache:
    """Allocate pools of `pages[i]` pages for KV group i, and page tables of all slots."""
    slots = config.max_seqs + 1  # one for padding rows
    groups = zip(config.kv_groups, pages, strict=True)
    return KVCache([GroupCache(group, count, slots, config.max_len, device, config.widest) for group, count in groups])


def build(rank: Rank, pages: Sequence[int], shapes: StepShapes | None = None) -> Runner:
    """Build the runner of a loaded rank, over a new `kv_cache`. shapes: of its steps; None: `StepShapes.of` its settings."""
    return build_runner(rank, kv_cache(rank.config, pages, rank.device), shapes or StepShapes.of(rank.config))


def build_runner(rank: Rank, cache: KVCache, shapes: StepShapes) -> Runner:
    """Build a runner over `cache`, and the stages of its steps."""
    config, model, device = rank.config, rank.model, rank.device
    slots = _slots(rank, cache)
    pages = PageCheck(slots) if config.debug_pages else None
    check = None if pages is None else partial(pages.compare, COPIED_ENTRY)

    def attention(geometry: Geometry, width: int) -> AttentionBackend:
        return attention_backend(config, geometry, cache, config.tp, shapes.sequences, check, width, rank.failed_checks)

    inputs = _inputs(rank, slots, shapes)
    forward = ForwardStage(model, attention(rank.geometry, config.widest), inputs, rank.inboxes, pages)
    sampler = Sampler(rank.parallel, rank.geometry.vocab, rank.geometry.softcap, config.suppress, device)
    sample = SampleStage(model, sampler, slots, rank.inboxes)
    draft = None
    if rank.drafter is not None:
        draft = DraftStage(rank.drafter, config.widest - 1, attention(rank.drafter.geometry, 1), inputs, sample)
    encode = EncodeStage(rank.encoders, device, rank.parallel, config.encoder_host_bytes)
    results = config.widest * (shapes.sequences[-1] + shapes.prefill)
    report = ReportStage(results, device, pages, encode, debug_hash=config.debug_hash)
    return Runner(shapes, slots, inputs, forward, sample, draft, encode, report, device.type == "cuda" and config.graphs)


def _slots(rank: Rank, cache: KVCache) -> SlotState:
    config, share = rank.config, vocab_share(rank.geometry.vocab, rank.parallel.size)
    ids = range(rank.parallel.rank * share, (rank.parallel.rank + 1) * share)
    return SlotState(config.max_seqs, config.max_len, cache, ids, rank.device, config.widest - 1)


def _inputs(rank: Rank, slots: SlotState, shapes: StepShapes) -> StepBuffers:
    soft = None
    if rank.encoders:
        soft = torch.zeros((shapes.padded_prompts, rank.geometry.hidden), dtype=rank.model.dtype, device=rank.device)
    return StepBuffers(slots, rank.model.frequencies, shapes, soft)
