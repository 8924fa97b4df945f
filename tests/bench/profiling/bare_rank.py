"""A rank without core and replica: random weights, pools full of random K and V, sequences admitted with their context computed."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from engine.geometry import KVGroup
from engine.memory import inbox_rows
from engine.plan import StepPlan, single_rows
from engine.rank.builder import Rank
from engine.rank.builder import build as build_runner
from engine.rank.kv import KVCache
from engine.rank.models.gemma4 import Attention
from engine.rank.models.layers import Experts, VocabTable
from engine.rank.runner import Runner
from engine.rank.step_times import admission_plan
from engine.rank.weight import Weight
from engine.step_shapes import StepShapes
from tests.bench.profiling.loopback import Loopback
from tests.support.launches import compilations

READ_RATE = 4.56e12  # bytes a second, the best seen on an H200
_SPARE = 8           # tokens that pages are held for behind the last step


def pages_held(groups: Sequence[KVGroup], batch: int, context: int, steps: int) -> tuple[int, ...]:
    """Pages of each group's pool, null page included, for `batch` sequences that decode `steps` tokens behind `context`."""
    return tuple(batch * len(group.pages_for(context - 1, context + steps + _SPARE)) + 1 for group in groups)


@dataclass(frozen=True)
class BareRank(Rank):
    """A loaded rank and its runner. adapters: sequences have one of so many, in turn; 0: they have none."""

    runner: Runner = field(kw_only=True)
    adapters: int = field(default=0, kw_only=True)

    @property
    def cache(self) -> KVCache:
        return self.runner.slots.cache

    def admission(self, batch: int, context: int, steps: int, step: int) -> StepPlan:
        """Plan `step`: `batch` sequences of `context` tokens whose K and V are there; each decodes its last one."""
        slots, end = list(range(batch)), context + steps + _SPARE
        plan = admission_plan(self.cache, self.geometry.vocab, slots, context, context - 1, end)
        for index, admission in enumerate(plan.admissions if self.adapters else ()):
            plan.admissions[index] = admission._replace(adapter=index % self.adapters)
        return msgspec.structs.replace(plan, step=step, rows=single_rows(slots))

    def run(self, plans: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Every plan, two out at a time: results, and seconds."""
        began = time.monotonic()
        return self.runner.run(plans), time.monotonic() - began

    def step_bytes(self, batch: int, context: int) -> int:
        """Bytes that a decode step of `batch` rows reads: all matrices, of tables the rows of its tokens and the whole head, of
        experts as many as random choices hit, and the K and V that the rows see."""
        model, moe, size = self.model, self.geometry.moe, 0
        tables = [module for module in model.modules() if isinstance(module, VocabTable)]
        experts = [weight for module in model.modules() if isinstance(module, Experts) for weight in module.children()]
        copy = model.head.fp8_copy
        apart = {id(weight) for weight in [*experts, *(table.head for table in tables), copy]}
        for module in model.modules():
            if id(module) not in apart:
                size += sum(own.nbytes for own in module.parameters(recurse=False) if own.ndim > 1)
            if isinstance(module, Attention):
                cache = self.cache.of(module.layer)
                seen = min(context, cache.group.window or context)
                size += batch * seen * cache.group.page_bytes // (cache.group.page * len(cache.pool))
        if moe is not None:
            size += int(sum(map(_bytes, experts)) * (1 - (1 - moe.top_k / moe.experts) ** batch))
        return size + sum(batch * _bytes(table.head) // table.head.shape[0] for table in tables) + _bytes(copy or model.head.head)


def build(
    rank: Rank, pages: Sequence[int], report: Callable[[str], None] = lambda _: None, batches: Iterable[int] | None = None
) -> BareRank:
    """A loaded rank over pools of random K and V, captured where it can be.

    report   hears how long that took
    batches  of which steps are padded and captured; None: all up to max_seqs
    """
    if isinstance(rank.parallel, Loopback):
        rows = inbox_rows(rank.config, rank.geometry)
        rank = replace(rank, inboxes=rank.parallel.inboxes(rows, rank.geometry.summed_width, rank.model.dtype))
    shapes = StepShapes.of(rank.config)
    if batches is not None:
        wanted = {shapes.sequences_of(batch) for batch in batches}
        shapes = replace(shapes, sizes=tuple(sizes for sizes in shapes.sizes if not sizes.prompts and sizes.decodes in wanted))
    runner = build_runner(rank, pages, shapes)
    for cache in runner.slots.cache:
        for layer in cache.pool:
            layer[1:].copy_(torch.randn_like(layer[1:], dtype=rank.model.dtype))
    if runner.capturable:
        began = time.monotonic()
        runner.capture()
        report(f"{compilations()} kernels, graphs captured in {time.monotonic() - began:.1f} s")
    return BareRank(**vars(rank), runner=runner)


def _bytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight.parameters())
