"""What a rank checks of its GPU and model before it serves.

    our kernels         on an untested GPU architecture: a wrong one stops the boot
    other backends      always: where one rank finds a fault, all ranks use our own
    FlashInfer's NVFP4  always: a wrong product stops the boot

Each shape in use runs once over poisoned pages. Poison is finite, as FlashInfer multiplies unseen values by zero.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from engine.attention import BACKENDS, OWN
from engine.attention.backend_entry import ROW_KINDS, RowKind
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.geometry import Geometry, KVGroup, Layer
from engine.rank.attention import FailedChecks, attention_backend, paged
from engine.rank.attention.base import AttentionPart, AttentionParts, PartSettings
from engine.rank.batch import Chunk, ForwardBatch, eager_batch, frequencies_of
from engine.rank.kv import ROW_TOKENS, GroupCache, KVCache
from engine.rank.models.architecture import Model
from engine.rank.nvfp4 import Nvfp4Weight, e2m1
from engine.rank.parallel import Inboxes, Parallel
from kernels import selfcheck
from kernels.inbox_check import inbox_checks
from kernels.qkv import replace_unturned

MIN_RESIDUAL_RMS = 1e-3  # of a forward over random ids: below it weights are missing or zero
ROWS = 5  # of a check, at most
_POISON = 50.0
_PRODUCT_ROWS = 130  # more than a tile of scales
_CHECKED_OUTPUTS = 300  # the last rows of a matrix
_DTYPE = torch.bfloat16  # in which a page that is wrong among fifty changes a row by a tenth at least


def is_untried(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in selfcheck.RUN_ON


def check_kernels(device: torch.device) -> None:
    _refuse(selfcheck.failures(selfcheck.CHECKS, device, torch.bfloat16))


def check_inboxes(parallel: Parallel, inboxes: Inboxes, n: int, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError names wrong kernels among those that write into peers' memory. n: elements of
    fused norms. A collective call."""
    wrong = selfcheck.failures(inbox_checks(inboxes.allreduce, inboxes.argmax, n), device, dtype)
    parallel.all_reduce(torch.zeros(64, device=device))  # no rank writes any more
    if inboxes.allreduce.failed or not (inboxes.allreduce.empty and inboxes.argmax.empty):
        wrong.append("the ranks' inboxes are not left empty, or a rank's part did not come")
    parallel.all_reduce(torch.zeros(64, device=device))  # no rank writes again before all have read
    _refuse(wrong)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError(f"kernels have failed their checks on this GPU, whose architecture nobody tried: {'; '.join(wrong)}")


@torch.inference_mode()
def check_products(model: Model) -> None:
    """ConfigError: a product is not plain torch's."""
    matrices = [module for module in model.modules() if isinstance(module, Nvfp4Weight) and module.calls is not None]
    for shape, weight in {weight.shape: weight for weight in reversed(matrices)}.items():
        x = exact_rows(_PRODUCT_ROWS, shape[1]).to(weight.device, _DTYPE)
        rows = slice(-_CHECKED_OUTPUTS, None)
        error = selfcheck.row_error(weight.rows_product(x, _DTYPE)[:, rows], weight.reference(x, rows))
        if not error <= selfcheck.TOLERANCE[_DTYPE]:
            product = f"FlashInfer's product with a matrix of {shape[0]} x {shape[1]}"
            raise ConfigError(f"weights: nvfp4: {product} is wrong by {error:.2g} on this GPU: set weights: auto")


def exact_rows(rows: int, columns: int) -> torch.Tensor:
    """fp32 rows that NVFP4 holds exactly: a 6 in each group, times powers of two."""
    generator = torch.Generator().manual_seed(columns)
    groups = e2m1(torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)).unflatten(1, (-1, 16))
    groups[..., 0] = 6
    exponents = torch.randint(-4, 1, groups.shape[:2], generator=generator)
    return (groups * 2.0 ** exponents[..., None]).flatten(1)


@torch.inference_mode()
def check_attention(parallel: Parallel, config: EngineConfig, device: torch.device) -> tuple[FailedChecks, tuple[str, ...]]:
    """The parts of other backends that any rank found wrong, and sentences about them. A collective call."""
    own = OWN[device.type]
    used = {kind: entry for kind in ROW_KINDS if (entry := BACKENDS[config.attention_of(kind) or own.name]).parts != own.parts}
    if not used:
        return (), ()
    geometry = config.geometry
    groups = config.kv_groups
    settings = PartSettings(geometry.heads // config.tp, geometry.eps, (ROWS,), device)
    names = [(kind, group.index) for kind in used for group in groups]
    errors: dict[tuple[RowKind, int], float] = {}
    for kind, entry in used.items():
        parts = import_module(entry.parts).parts(settings, download=config.flashinfer_download)
        errors |= mismatches(kind, geometry, groups, settings, parts)
    failed = failed_on_any_rank(parallel, names, errors, device)
    sentences = []
    for kind, index in sorted(failed):
        if (kind, index) in errors:
            how = f"by {errors[kind, index]:.2g}"
        else:
            how = "on another rank"
        if kind == "decode":
            rows = "decode rows"
        else:
            rows = "prefill chunks"
        sentences.append(f"{used[kind].name} is wrong {how} for {rows} of {groups[index].name} layers: {own.name} in its place")
    return failed, tuple(sentences)


def mismatches(
    kind: RowKind, geometry: Geometry, groups: Sequence[KVGroup], settings: PartSettings, parts: AttentionParts
) -> dict[tuple[RowKind, int], float]:
    """Largest row error, relative to its norm, by kind and group index, above TOLERANCE. settings: a bucket of at least ROWS."""
    errors = {}
    for given in groups:
        group = replace(given, index=0, layers=given.layers[:1])
        layer = geometry.layers[group.layers[0]]
        visible = group.window or 500
        page = group.page
        if kind == "decode":  # at the edges of window and page, one of a single key, and padding
            spans = [(end - 1, end) for end in (visible + 2 * page + 6, page, page + 1, 1, 0)]
        else:  # a fresh chunk, and one whose window begins inside a page of its prefix
            spans = [(0, 40), (visible + 3, visible + 36)]
        chunks = (Chunk(0, *spans[0], 0), Chunk(1, *spans[1], 40)) if kind == "extend" else ()
        cache, batch = _poisoned_sequences(group, layer, spans, settings.device, chunks)
        weight = torch.full((group.head_dim,), group.head_dim**-0.25, dtype=_DTYPE, device=settings.device)  # scores of deviation 1
        norms = (weight, weight)
        width = (settings.heads + (2 - layer.k_eq_v) * group.kv_heads) * group.head_dim
        qkv = torch.randn((batch.rows, width), generator=torch.Generator().manual_seed(batch.rows)).to(settings.device, _DTYPE)
        (block,), outputs = batch.blocks, []
        for maker in (paged.parts(settings), parts):
            part: AttentionPart = getattr(maker, kind)(cache)
            outputs.append(qkv.new_zeros(batch.rows, settings.heads * group.head_dim))
            part.attend(qkv, layer, norms, block, part.prepare(block), outputs[-1])
        expected, actual = outputs
        errors[kind, given.index] = selfcheck.row_error(actual, expected)
    return {key: error for key, error in errors.items() if not error <= selfcheck.TOLERANCE[_DTYPE]}


def _poisoned_sequences(
    group: KVGroup, layer: Layer, spans: Sequence[tuple[int, int]], device: torch.device, chunks: tuple[Chunk, ...]
) -> tuple[GroupCache, ForwardBatch]:
    """A slot for each span, pages shuffled, with poison after its end and in its table's tail."""
    generator = torch.Generator().manual_seed(group.head_dim)
    needed = [group.pages_for(start, end) if end else range(0) for start, end in spans]
    poisoned = 1 + sum(map(len, needed))
    longest = max(end for _, end in spans) + ROW_TOKENS
    cache = GroupCache(replace(group, dtype="bfloat16"), poisoned + 1, len(spans), longest, device)
    pool = torch.randn(cache.pool.shape[1:], generator=generator)
    pool[:, 0] *= group.head_dim**-0.25
    if layer.k_eq_v:  # K is V times its norm's weight where rope does not turn it, and may be read there
        pool[:, 0] = replace_unturned(pool[:, 0], pool[:, 1] * group.head_dim**-0.25, layer.rope.pairs)
    pool[0], pool[poisoned] = 0, _POISON
    free = (torch.randperm(poisoned - 1, generator=generator) + 1).int().split([len(entries) for entries in needed])
    for slot, ((_, end), entries, pages) in enumerate(zip(spans, needed, free, strict=True)):
        cache.table[slot, entries.stop :] = poisoned
        cache.table[slot, entries.start : entries.stop] = pages.to(device)
        if end % group.page:
            pool[pages[-1], :, :, end % group.page :] = _POISON
    cache.pool[0] = pool.to(device, _DTYPE)
    slots = torch.cat([torch.full((end - start,), slot) for slot, (start, end) in enumerate(spans)]).to(device)
    positions = torch.cat([torch.arange(*span) for span in spans]).to(device)
    return cache, eager_batch(KVCache([cache]), frequencies_of([layer], device), torch.zeros_like(slots), slots, positions, chunks)


def failed_on_any_rank(parallel: Parallel, names: Sequence[Any], failed: Collection[Any], device: torch.device) -> set[Any]:
    """A collective call with the same `names`."""
    flags = torch.tensor([float(name in failed) for name in names], device=device)
    return {name for name, count in zip(names, parallel.all_reduce(flags).tolist(), strict=True) if count}


@torch.inference_mode()
def residual_rms(model: Model, groups: Sequence[KVGroup]) -> float:
    """RMS of the last residual over a short prompt. CheckpointError below 1e-3 or NaN. A collective call."""
    geometry = model.geometry
    size = 16
    device = model.device
    positions = torch.arange(size, device=device)
    ids = (positions * 7 + 2) % geometry.vocab
    cache = KVCache([GroupCache(group, 2, 1, size, device) for group in groups])
    for group in cache:
        group.table[0, 0] = 1
    batch = eager_batch(cache, model.frequencies, ids, torch.zeros_like(ids), positions, (Chunk(0, 0, size, 0),))
    attention = attention_backend(None, geometry, cache, model.parallel.size, (1,))
    rms = model.states(batch, attention)[0].float().pow(2).mean().sqrt().item()
    if not rms >= MIN_RESIDUAL_RMS:
        raise CheckpointError(f"rms of the last residual is {rms:.2e}, below {MIN_RESIDUAL_RMS}: weights missing or zero")
    return rms
