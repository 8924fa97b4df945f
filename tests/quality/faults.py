"""Ranks with a lasting fault: `python -m tests.quality.faults FAULT '<BootArgs>'`, the real worker otherwise.

none           nothing: the instrument alone
wrong page     decode reads, two pages back in the sliding table, the page that stands one further back
dropped page   decode finds the null page where positions 32 to 63 of a full table were
window - 1     sliding layers see one key fewer        window + 1   and one more
stale tail     decode also sees the entry behind its own, which nobody has written for it
K as V         K is stored in V's place
rope dims      full layers rotate half of each head instead of a quarter
lost sum       this rank keeps its own part of one all-reduce of every decode step
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cluster.children import child_command
from engine import config
from engine.geometry import KVGroup, Layer
from engine.lifeline import BootArgs
from engine.plan import PlanView
from engine.rank import runner, worker
from engine.rank.attention import base, paged
from engine.rank.batch import RopeTensors
from engine.rank.models import gemma4
from kernels.allreduce import MappedCollectives

SUM = 4  # which all-reduce of a step: the embedding's is 0
_PAGE_DROPPED = 1


@dataclass(frozen=True)
class Everywhere:
    """A Command of `Group.boot`: every rank has `fault`; a lost sum is rank 1's alone."""

    fault: str

    def __call__(self, args: BootArgs) -> Sequence[str]:
        """The child's command line."""
        if args.index == args.tp or (self.fault == "lost sum" and args.index != 1):
            return child_command(args)
        return [sys.executable, "-m", "tests.quality.faults", self.fault, child_command(args)[-1]]


def _plant_decode(change: Callable[[Tensor, Tensor, int, int | None], Tensor]) -> None:
    """`change` gets (page ids, positions, page, window) of a layer's decode rows and gives the page ids that are read."""
    whole = paged.decode_attention

    def decode_attention(
        qkv: Tensor, pool: Tensor, page_ids: Tensor, positions: Tensor, *rest: Any, **more: Any
    ) -> None:
        whole(qkv, pool, change(page_ids, positions, pool.shape[3], rest[4]), positions, *rest, **more)

    paged.decode_attention = decode_attention  # type: ignore[attr-defined]


def _own(positions: Tensor, page: int, window: int | None) -> Tensor:
    """The place, among a row's page ids, of the page of its own position."""
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0) // page
    return (positions // page - first).long()


def _wrong_sliding_page() -> None:
    def change(page_ids: Tensor, positions: Tensor, page: int, window: int | None) -> Tensor:
        place = _own(positions, page, window)
        rows = (place >= 2).nonzero().squeeze(1)
        if window is None or not len(rows):
            return page_ids
        page_ids = page_ids.clone()
        page_ids[rows, place[rows] - 1] = page_ids[rows, place[rows] - 2]
        return page_ids

    _plant_decode(change)


def _dropped_page() -> None:
    def change(page_ids: Tensor, positions: Tensor, page: int, window: int | None) -> Tensor:
        if window is None:
            page_ids = page_ids.clone()
            page_ids[positions >= 2 * page, _PAGE_DROPPED] = 0
        return page_ids

    _plant_decode(change)


def _stale_tail() -> None:
    """A second launch, of queries alone, a position further on where that is the same page."""
    whole = paged.decode_attention

    def decode_attention(qkv: Tensor, pool: Tensor, page_ids: Tensor, positions: Tensor, *rest: Any, **more: Any) -> None:
        whole(qkv, pool, page_ids, positions, *rest, **more)
        cos_sin, q_norm, _, eps, window, scratch, out, *cut = rest
        page, further = pool.shape[3], positions + 1
        same = (further % page != 0) & (positions >= 0)
        if window is not None:
            same &= ((further - window + 1).clamp(min=0) // page) == ((positions - window + 1).clamp(min=0) // page)
        queries = qkv[:, : out.shape[1]].contiguous()
        at = torch.where(same, further, positions)
        whole(queries, pool, page_ids, at, cos_sin, q_norm, None, eps, window, scratch, out, *cut, **more)

    paged.decode_attention = decode_attention  # type: ignore[attr-defined]


def _window(by: int) -> None:
    """Of the ranks' own groups; the core releases by the right one."""
    whole = config.kv_groups

    def kv_groups(*about: Any) -> tuple[KVGroup, ...]:
        return tuple(replace(group, window=group.window and group.window + by) for group in whole(*about))

    config.kv_groups = kv_groups  # type: ignore[attr-defined]


def _key_as_value() -> None:
    decode, post = paged.decode_attention, base.qkv_post

    def copy(pool: Tensor, pages: Tensor, positions: Tensor) -> None:
        offsets = positions.long() % pool.shape[3]
        pool[pages.long(), 1, :, offsets] = pool[pages.long(), 0, :, offsets]

    def decode_attention(qkv: Tensor, pool: Tensor, page_ids: Tensor, positions: Tensor, *rest: Any, **more: Any) -> None:
        decode(qkv, pool, page_ids, positions, *rest, **more)
        rows = (positions >= 0).nonzero().squeeze(1)
        own = _own(positions, pool.shape[3], rest[4])
        if qkv.shape[1] > rest[6].shape[1]:
            copy(pool, page_ids[rows, own[rows]], positions[rows])

    def qkv_post(qkv: Tensor, pool: Tensor, table: Tensor, slots: Tensor, positions: Tensor, *rest: Any, **more: Any) -> None:
        post(qkv, pool, table, slots, positions, *rest, **more)
        if qkv.shape[1] > rest[4].shape[1] * rest[4].shape[2]:
            copy(pool, table[slots.long(), positions.long() // pool.shape[3]], positions)

    paged.decode_attention, base.qkv_post = decode_attention, qkv_post  # type: ignore[attr-defined]


def _rope_dims() -> None:
    whole = gemma4.frequencies_of  # type: ignore[attr-defined]

    def frequencies(layers: Iterable[Layer], device: torch.device) -> RopeTensors:
        made = {}
        for layer in layers:
            pairs = (2 if layer.head_dim == 512 else 1) * layer.rope.pairs
            (made[layer.rope, layer.head_dim],) = whole([replace(layer, rope=replace(layer.rope, pairs=pairs))], device).values()
        return made

    gemma4.frequencies_of = frequencies  # type: ignore[attr-defined]


def _lost_sum() -> None:
    whole, read = MappedCollectives.all_reduce, runner.read_plan  # type: ignore[attr-defined]
    left = [-1]

    def read_plan(data: bytes) -> PlanView:
        plan: PlanView = read(data)
        left[0] = -1 if len(plan.chunks) else SUM
        return plan

    def all_reduce(self: MappedCollectives, x: Tensor) -> Tensor:
        own = x.clone()
        total = whole(self, x)
        due = left[0] == 0
        left[0] -= x.dim() == 2
        return own if due else total

    runner.read_plan = read_plan  # type: ignore[attr-defined]
    MappedCollectives.all_reduce = all_reduce  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "wrong page": _wrong_sliding_page,
    "dropped page": _dropped_page,
    "window - 1": lambda: _window(-1),
    "window + 1": lambda: _window(+1),
    "stale tail": _stale_tail,
    "K as V": _key_as_value,
    "rope dims": _rope_dims,
    "lost sum": _lost_sum,
}


def main() -> None:
    """Patch, then be the worker."""
    FAULTS[sys.argv.pop(1)]()
    worker.main()


if __name__ == "__main__":
    main()
