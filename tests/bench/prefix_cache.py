"""What the prefix cache finds and what it costs: `python -m tests.bench.prefix_cache [--plot FILE]`.

Round robin of conversations at several working sets, beside a cache that never forgets and beside Belady's optimum; then the time
and memory of lookups and admissions: a 128k prompt, and a million cached pages.
"""

import argparse
import time
import tracemalloc
from array import array
from pathlib import Path

import msgspec
import numpy as np

from deploy.models.public_shapes import PUBLIC, config
from engine.core.pages import PagePool
from engine.core.prefix import PrefixCache
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.segment import extend_keys, root_key
from engine.geometry import kv_groups, parse_config
from engine.plan import encode_plan
from engine.protocol import GenerateRequest, SamplingParams, decode_front_message, encode_message, pack_tokens
from tests.bench.core import Rings
from tests.support.engine.conversations import GROUPS, PAGE, TAIL, Trace, optimum, portions, serve, unlimited

WORKING_SETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)


def rates(trace: Trace) -> list[tuple[float, float, float]]:
    """(working set over pools, found, at most), as parts of what an infinite cache finds."""
    best = unlimited(trace).hit
    found = []
    for working_set in WORKING_SETS:
        pages = portions(trace, working_set)
        found.append((working_set, serve(trace, pages)[0].hit / best, optimum(trace, pages).hit / best))
        print(f"working set {working_set:.0%} of the pools: found {found[-1][1]:.3f}, at most {found[-1][2]:.3f}", flush=True)
    return found


def plot(found: list[tuple[float, float, float]], file: Path) -> None:
    """Both curves over the working set."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    sets = [100 * each for each, _, _ in found]
    axes.plot(sets, [value for _, value, _ in found], marker="o", label="this cache")
    axes.plot(sets, [value for _, _, value in found], marker=".", linestyle="--", label="Belady's optimum (upper bound)")
    axes.set(xlabel="working set, % of the pools", ylabel="tokens found, of an infinite cache's", ylim=(0, 1.05))
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(file, dpi=110)


def lookup_ms(tokens: int) -> tuple[float, float]:
    """Milliseconds of finding a prompt of so many tokens that is cached to its last page: keys to be made, and keys known."""
    prompt = array("i", np.random.default_rng(0).integers(0, 200_000, tokens, np.int32).tobytes())
    count = (tokens - 1) // PAGE
    cache, full, sliding = caches(count + 1, TAIL + 1)
    keys: list[bytes] = []
    extend_keys(keys, root_key(0, ""), prompt, PAGE, count)
    cache.insert(keys, full.take(count), sliding.take(TAIL))
    made, known = [], []
    for _ in range(20):
        began = time.perf_counter()
        keys = []
        extend_keys(keys, root_key(0, ""), prompt, PAGE, count)
        between = time.perf_counter()
        assert cache.find(keys).count == count
        made.append(time.perf_counter() - began)
        known.append(time.perf_counter() - between)
    return 1e3 * min(made), 1e3 * min(known)


def admission_ms(tokens: int) -> tuple[float, float]:
    """Core milliseconds, CPU, from the message of such a prompt to its plan in the ring: of one never seen, of one cached whole."""
    groups = kv_groups(parse_config(config(PUBLIC["31b"], "bfloat16")), 4)
    pages = (4000, 2 * tokens // 32 + 4000)
    core, rings = Scheduler(SchedulerConfig(groups, pages, 4, 2 * tokens, 8192, cache_share=1.0)), Rings()
    prompt = pack_tokens(np.random.default_rng(0).integers(0, 200_000, tokens).tolist())
    spent = []
    for number in range(4):
        raw = encode_message(GenerateRequest(id=number, prompt=prompt, params=SamplingParams(max_tokens=1)))
        began = time.thread_time()
        core.add(0, msgspec.convert(decode_front_message(raw), GenerateRequest))
        plan = core.schedule()
        assert plan is not None
        rings.plans.write(plan.step, encode_plan(plan))
        spent.append(1e3 * (time.thread_time() - began))
        while plan is not None:
            rings.run(plan)
            core.commit(rings.result())
            plan = core.schedule()
            if plan is not None:
                rings.plans.write(plan.step, encode_plan(plan))
        list(core.drain())
    assert core.counters.hit_tokens == 3 * ((tokens - 1) // 32 * 32)
    return spent[0], min(spent[1:])


def cached_mb(pages: int, each: int = 100) -> float:
    """Megabytes that so many cached pages take, in conversations of `each`, pools included."""
    tracemalloc.start()
    cache, full, sliding = caches(pages + 1, TAIL * (pages // each) + 1)
    for number in range(pages // each):
        keys: list[bytes] = []
        tokens = array("i", np.random.default_rng(number).integers(0, 200_000, each * PAGE, np.int32).tobytes())
        extend_keys(keys, root_key(0, ""), tokens, PAGE, each)
        held, tail = full.take(each), sliding.take(TAIL)
        cache.insert(keys, held, tail)
        full.give(held)
        sliding.give(tail)
    taken = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    assert full.idle == pages
    return taken


def caches(full_pages: int, sliding_pages: int) -> tuple[PrefixCache, PagePool, PagePool]:
    """A cache and its pools."""
    sliding, full = PagePool(GROUPS[0], sliding_pages), PagePool(GROUPS[1], full_pages)
    return PrefixCache(full, sliding), full, sliding


def main() -> None:
    """All figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates")
    args = parser.parse_args()
    made, known = lookup_ms(131_072)
    print(f"lookup of a cached 128k prompt: {made:.2f} ms with its keys made, {known:.2f} ms with them known")
    cold, hit = admission_ms(131_072)
    print(f"a 128k prompt from its message to its plan in the ring: {cold:.1f} ms, {hit:.1f} ms when it is cached")
    print(f"a million cached pages: {cached_mb(1_000_000):.0f} MB")
    found = rates(Trace(args.conversations))
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
