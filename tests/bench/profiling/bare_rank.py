"""A rank without core and replica: random weights, pools full of random K and V, sequences admitted with their context computed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.geometry import KVGroup
from engine.memory import inbox_rows
from engine.plan import StepPlan, single_rows
from engine.rank.builder import Rank
from engine.rank.builder import build as build_runner
from engine.rank.kv import KVCache
from engine.rank.models.gemma4 import Attention
from engine.rank.models.layers import Experts, VocabTable
from engine.rank.models.weight import Weight
from engine.rank.runner import Runner
from engine.rank.synthetic_plans import admission_plan
from tests.bench.profiling.loopback import Loopback
from tests.support.launches import compilations

READ_RATE = 4.56e12  # bytes a second, the best seen on an H200
_SPARE = 8           # tokens that pages are held for behind the last step


def pages_held(groups: Sequence[KVGroup], batch: int, context: int, steps: int) -> tuple[int, ...]:
    """Pages of each group's pool, null page included, for `batch` sequences that decode `steps` tokens behind `context`."""
    return tuple(batch * len(group.pages_for(context - 1, context + steps + _SPARE)) + 1 for group in groups)


@dataclass(frozen=True)
class BareRank(Rank):
    """A loaded rank and its runner."""

    runner: Runner = field(kw_only=True)

    @property
    def cache(self) -> KVCache:
        return self.runner.slots.cache

    def admission(self, batch: int, context: int, steps: int, step: int) -> StepPlan:
        """Plan `step`: `batch` sequences of `context` tokens whose K and V are there; each decodes its last one."""
        slots, end = list(range(batch)), context + steps + _SPARE
        plan = admission_plan(self.cache, self.geometry.vocab, slots, context, context - 1, end, step)
        return msgspec.structs.replace(plan, rows=single_rows(slots))

    def run(self, plans: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Every plan, two out at a time: results, and seconds."""
        began = time.monotonic()
        return self.runner.run(plans), time.monotonic() - began

    def module_bytes(self, batch: int, context: int) -> Iterator[tuple[str, int]]:
        """(module, bytes that a decode step reads of it): its own matrices, of a table the rows of `batch` tokens, of experts
        as many as random choices hit, and the K and V that `batch` rows see; "head" is the table that logits come of."""
        tables = {id(module.head) for module in self.model.modules() if isinstance(module, VocabTable)}
        experts = {id(weight) for module in self.model.modules() if isinstance(module, Experts) for weight in module.children()}
        for name, module in self.model.named_modules():
            size = sum(own.nbytes for own in module.parameters(recurse=False) if own.ndim > 1)
            if isinstance(module, VocabTable):
                size = batch * _bytes(module.head) // module.head.shape[0]
            elif id(module) in experts and (moe := self.geometry.moe):
                size = int(size * (1 - (1 - moe.top_k / moe.experts) ** batch))
            elif isinstance(module, Attention):
                group, pool = self.cache.of(module.layer).group, self.cache.of(module.layer).pool
                size = batch * 2 * group.kv_heads * group.head_dim * min(context, group.window or context) * pool.element_size()
            yield name, 0 if id(module) in tables else size
        yield "head", _bytes(self.model.head.head)

    def step_bytes(self, batch: int, context: int) -> int:
        return sum(size for _, size in self.module_bytes(batch, context))


def build(
    rank: Rank, pages: Sequence[int], report: Callable[[str], None] = lambda _: None, batches: Iterable[int] | None = None
) -> BareRank:
    """A loaded rank over pools of random K and V, captured where it can be.

    report   hears how long that took
    batches  of which steps are captured; None: all up to max_seqs
    """
    if isinstance(rank.parallel, Loopback):
        rows = inbox_rows(rank.config, rank.geometry)
        rank = replace(rank, inboxes=rank.parallel.inboxes(rows, rank.geometry.summed_width, rank.model.dtype))
    runner = build_runner(rank, pages)
    for cache in runner.slots.cache:
        for layer in cache.pool:
            layer[1:].normal_()
    if runner.capturable:
        began = time.monotonic()
        runner.capture(None if batches is None else sorted({runner._inputs.bucket(batch) for batch in batches}))
        report(f"{compilations()} kernels, graphs captured in {time.monotonic() - began:.1f} s")
    return BareRank(**vars(rank), runner=runner)


def _bytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight.parameters())
