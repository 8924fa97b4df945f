"""A rank without core and replica: random weights, pools full of random K and V, sequences admitted with their context computed."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.geometry import KVGroup
from engine.plan import Admission, PageAppend, StepPlan
from engine.protocol import SamplingParams
from engine.rank.builder import Rank
from engine.rank.builder import build as build_runner
from engine.rank.kv import KVCache
from engine.rank.runner import Runner
from kernels import launch

READ_RATE = 4.56e12  # bytes a second, the best seen on an H200
_SPARE = 8           # tokens that pages are held for behind the last step


def held(group: KVGroup, context: int, steps: int) -> range:
    """Table entries that a sequence needs while `steps` tokens are decoded behind `context`."""
    return range(group.pages_for(context - 1, context).start, group.pages_for(0, context + steps + _SPARE).stop)


def pages_held(groups: Sequence[KVGroup], batch: int, context: int, steps: int) -> tuple[int, ...]:
    """Pages of each group's pool, null page included, for `batch` such sequences."""
    return tuple(batch * len(held(group, context, steps)) + 1 for group in groups)


@dataclass(frozen=True)
class BareRank(Rank):
    """A loaded rank and its runner."""

    runner: Runner = field(kw_only=True)

    @property
    def cache(self) -> KVCache:
        return self.runner.slots.cache

    def admission(self, batch: int, context: int, steps: int, step: int) -> StepPlan:
        """Plan `step`: `batch` sequences of `context` tokens whose K and V are there; each decodes its last one."""
        rng = np.random.default_rng(batch)
        appends: list[PageAppend] = []
        for cache in self.cache:
            group, free = cache.group, iter(rng.permutation(np.arange(1, cache.pool.shape[1])).tolist())
            for slot in range(batch):
                appends.extend(PageAppend(group.index, slot, entry, next(free)) for entry in held(group, context, steps))
        plan, params = StepPlan(step, decodes=list(range(batch)), appends=appends), SamplingParams(max_tokens=1)
        for slot in range(batch):
            tokens = rng.integers(300, self.geometry.vocab - 10, context).tolist()
            plan.admissions.append(Admission(slot, step, tokens, context, params, cached=context - 1))
        return plan

    def run(self, plans: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Every plan, two out at a time: results, and seconds."""
        began = time.monotonic()
        return self.runner.run(plans), time.monotonic() - began

    def step_bytes(self, batch: int, context: int) -> int:
        """Weights that a decode step reads once, and the K and V that `batch` rows see."""
        skipped = ("ple_tokens", "experts")
        dense = sum(p.nbytes for name, p in self.model.named_parameters() if not any(part in name for part in skipped))
        read = [self.cache.of(layer).group for layer in self.geometry.layers]
        seen = sum(2 * group.kv_heads * group.head_dim * min(context, group.window or context) for group in read)
        return dense + batch * seen * self.cache.groups[0].pool.element_size()


def build(
    rank: Rank, pages: Sequence[int], report: Callable[[str], None] = lambda _: None, batches: Iterable[int] | None = None
) -> BareRank:
    """A loaded rank over pools of random K and V, captured where it can be.

    report   hears how long that took
    batches  of which steps are captured; None: all up to max_seqs
    """
    runner = build_runner(rank, pages)
    for cache in runner.slots.cache:
        for layer in cache.pool:
            layer[1:].normal_()
    if runner.capturable:
        began = time.monotonic()
        runner.capture(None if batches is None else sorted({runner.bucket(batch) for batch in batches}))
        report(f"{launch.compilations()} kernels, graphs captured in {time.monotonic() - began:.1f} s")
    return BareRank(**vars(rank), runner=runner)
