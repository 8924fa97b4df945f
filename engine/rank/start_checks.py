"""What a rank checks of its own GPU and model before it serves.

    our kernels         on a GPU of an architecture that nobody tried: where one is wrong the rank refuses to start
    other backends'     wherever they were chosen: what one rank finds wrong, all ranks leave to our own
"""

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import torch

from engine.attention import BACKENDS, OWN
from engine.attention.backend_entry import ROW_KINDS, RowKind
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.geometry import Geometry, KVGroup
from engine.rank.attention import AttentionConfig, FailedChecks, attention_backend, parts_check
from engine.rank.attention.base import PartSettings
from engine.rank.batch import Chunk, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.architecture import Model
from engine.rank.parallel import Inboxes, Parallel
from kernels import selfcheck
from kernels.inbox_check import inbox_checks

MIN_RESIDUAL_RMS = 1e-3  # of a forward over random ids: below it weights are missing or zero


def is_untried(device: torch.device) -> bool:
    """Whether `device` is a GPU of an architecture on which our kernels' tests have not run."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in selfcheck.RUN_ON


def check_kernels(device: torch.device) -> None:
    """Runs each kernel against plain torch. ConfigError names those that are wrong."""
    _refuse(selfcheck.failures(selfcheck.CHECKS, device, torch.bfloat16))


def check_inboxes(parallel: Parallel, inboxes: Inboxes, n: int, device: torch.device, dtype: torch.dtype) -> None:
    """Runs each kernel that writes into other ranks' memory, for fused norms of `n` elements. ConfigError names those that are
    wrong. Every rank must call it."""
    wrong = selfcheck.failures(inbox_checks(inboxes.allreduce, inboxes.argmax, n), device, dtype)
    parallel.all_reduce(torch.zeros(64, device=device))  # nobody writes any more
    if inboxes.allreduce.failed or not (inboxes.allreduce.empty and inboxes.argmax.empty):
        wrong.append("the ranks' inboxes are not left empty, or a rank's part did not come")
    _refuse(wrong)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError(f"kernels have failed their checks on this GPU, whose architecture nobody tried: {'; '.join(wrong)}")


@torch.inference_mode()
def check_attention(
    parallel: Parallel, config: EngineConfig, geometry: Geometry, device: torch.device
) -> tuple[FailedChecks, tuple[str, ...]]:
    """Check parts of backends that are not of our own ops; returns those that any rank found wrong, and a sentence for each.

    Every rank must call it.
    """
    own = OWN[device.type]
    used = {kind: entry for kind in ROW_KINDS if (entry := BACKENDS[config.attention_of(kind) or own.name]).parts != own.parts}
    if not used:
        return (), ()
    groups = config.kv_groups(geometry)
    settings = PartSettings(geometry.heads // config.tp, geometry.eps, (parts_check.ROWS,), device)
    names = [(kind, group.index) for kind in used for group in groups]
    errors: dict[tuple[RowKind, int], float] = {}
    for kind, entry in used.items():
        parts = import_module(entry.parts).parts(settings, download=config.flashinfer_download)
        errors |= parts_check.mismatches(kind, geometry, groups, settings, parts)
    failed, sentences = failed_on_any_rank(parallel, names, errors, device), []
    for kind, index in sorted(failed):
        how = f"by {errors[kind, index]:.2g}" if (kind, index) in errors else "on another rank"
        rows = "decode rows" if kind == "decode" else "prefill chunks"
        sentences.append(f"{used[kind].name} is wrong {how} for {rows} of {groups[index].name} layers: {own.name} in its place")
    return failed, tuple(sentences)


def failed_on_any_rank(parallel: Parallel, names: Sequence[Any], failed: Collection[Any], device: torch.device) -> set[Any]:
    """Returns those of `names` that failed on any rank. Every rank must call it, with the same names."""
    flags = torch.tensor([float(name in failed) for name in names], device=device)
    return {name for name, count in zip(names, parallel.all_reduce(flags).tolist(), strict=True) if count}


@torch.inference_mode()
def residual_rms(model: Model, groups: Sequence[KVGroup]) -> float:
    """Compute the root mean square of the residual stream behind the last layer, over a short fixed prompt; every rank must call
    it.

    CheckpointError below 1e-3, or if it is not a number: such a model answers, but says nothing.
    """
    geometry, size, device = model.geometry, 16, model.device
    positions = torch.arange(size, device=device)
    ids = (positions * 7 + 2) % geometry.vocab
    cache = KVCache([GroupCache(group, 2, 1, size, device) for group in groups])
    for group in cache:
        group.table[0, 0] = 1
    batch = eager_batch(cache, model.frequencies, ids, torch.zeros_like(ids), positions, (Chunk(0, 0, size, 0),))
    attention = attention_backend(AttentionConfig(), geometry, cache, model.parallel.size, (1,), device)
    rms = model.states(batch, attention)[0].float().pow(2).mean().sqrt().item()
    if not rms >= MIN_RESIDUAL_RMS:
        raise CheckpointError(f"rms of the last residual is {rms:.2e}, below {MIN_RESIDUAL_RMS}: weights missing or zero")
    return rms
