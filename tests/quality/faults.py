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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cluster.children import boot_json, child_command
from engine.geometry import Layer
from engine.lifeline import BootArgs
from engine.plan import StepPlan
from engine.rank import worker
from engine.rank.attention import reference
from engine.rank.kv import GroupCache
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
        if args.role == "core" or (self.fault == "lost sum" and args.index != 1):
            return child_command(args)
        return [sys.executable, "-m", "tests.quality.faults", self.fault, boot_json(args)]


def _wrong_page(table: Tensor, slots: Tensor, positions: Tensor, page: int) -> Tensor:
    place = positions // page
    rows = place >= 2
    table = table.clone()
    table[slots[rows], place[rows] - 1] = table[slots[rows], place[rows] - 2]
    return table


def _plant_decode(change: Callable[..., tuple[Tensor, Tensor, Sequence[int], int | None]]) -> None:
    """`change` gets (table, slots, positions, bounds, window, page) and gives (table, positions, bounds, window)."""
    whole = reference.paged_decode

    def paged_decode(
        q: Tensor, pool: Tensor, table: Tensor, slots: Tensor, positions: Tensor, bounds: Sequence[int], window: int | None
    ) -> Tensor:
        table, positions, bounds, window = change(table, slots, positions, bounds, window, pool.shape[3])
        return whole(q, pool, table, slots, positions, bounds, window)

    reference.paged_decode = paged_decode  # type: ignore[attr-defined]


def _wrong_sliding_page() -> None:
    def change(table: Tensor, slots: Tensor, positions: Tensor, bounds: Any, window: int | None, page: int) -> Any:
        return (_wrong_page(table, slots, positions, page) if window else table), positions, bounds, window

    _plant_decode(change)


def _dropped_page() -> None:
    def change(table: Tensor, slots: Tensor, positions: Tensor, bounds: Any, window: int | None, page: int) -> Any:
        if not window:
            table = table.clone()
            table[slots[positions >= 2 * page], _PAGE_DROPPED] = 0
        return table, positions, bounds, window

    _plant_decode(change)


def _stale_tail() -> None:
    def change(table: Tensor, slots: Tensor, positions: Tensor, bounds: Any, window: int | None, page: int) -> Any:
        room = table.shape[1] * page
        return table, (positions + 1).clamp(max=room - 1), [min(bound + 1, room) for bound in bounds], window

    _plant_decode(change)


def _window(by: int) -> None:
    def change(table: Tensor, slots: Tensor, positions: Tensor, bounds: Any, window: int | None, page: int) -> Any:
        return table, positions, bounds, window + by if window else None

    _plant_decode(change)
    whole = reference.paged_prefill
    reference.paged_prefill = lambda q, pool, pages, start, window: whole(  # type: ignore[attr-defined]
        q, pool, pages, start, window + by if window else None
    )


def _key_as_value() -> None:
    whole = GroupCache.write
    GroupCache.write = lambda self, layer, batch, k, v: whole(self, layer, batch, k, k)  # type: ignore[method-assign]


def _rope_dims() -> None:
    whole = gemma4._frequencies

    def frequencies(layer: Layer) -> Tensor:
        if layer.head_dim == 512:
            layer = replace(layer, rope=replace(layer.rope, pairs=2 * layer.rope.pairs))
        return whole(layer)

    gemma4._frequencies = frequencies


def _lost_sum() -> None:
    whole, read = MappedCollectives.all_reduce, worker.decode_plan  # type: ignore[attr-defined]
    left = [-1]

    def decode_plan(data: bytes) -> StepPlan:
        plan: StepPlan = read(data)
        left[0] = -1 if plan.chunks else SUM
        return plan

    def all_reduce(self: MappedCollectives, x: Tensor) -> Tensor:
        own = x.clone()
        total = whole(self, x)
        due = left[0] == 0
        left[0] -= x.dim() == 2
        return own if due else total

    worker.decode_plan = decode_plan  # type: ignore[attr-defined]
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
