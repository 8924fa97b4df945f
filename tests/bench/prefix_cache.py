"""What the prefix cache finds and what it costs: `python -m tests.bench.prefix_cache [--plot FILE]`.

Round robin of conversations at several working sets, with both pools as scarce as each other and with one of them, beside a cache
that never forgets, one that evicts strictly in order, and Belady's optimum; what the second conversation of a tenant finds of its
system prompt; then the time and memory of lookups and admissions: a 128k prompt, and a million cached pages.
"""

import argparse
import time
import tracemalloc
from array import array
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np

from engine.core.pages import PagePool
from engine.core.prefix import PrefixCache, extend_keys, root_key
from engine.core.scheduler import Scheduler
from engine.geometry import kv_groups, parse_config
from engine.plan import encode_plan
from engine.protocol import GenerateRequest, decode_front_message, encode_message
from tests.bench.core import Rings
from tests.bench.record import Row, add_record_option, append
from tests.nano.model_shapes import PUBLIC, config
from tests.support.engine.conversations import GROUPS, PAGE, TAIL, Trace, optimum, portions, serve, unlimited
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of

WORKING_SETS = (0.25, 0.5, 0.9, 1.25, 1.5)
SCARCE = {"both pools": (1, 1), "sliding pool": (1, 3), "full pool": (3, 1)}  # how much larger (sliding, full) is than its portion


@dataclass(frozen=True)
class Rate:
    """Of the tokens that an infinite cache finds: what is found, what strict least-recently-used order finds, and a bound."""

    working_set: float
    found: float
    strict: float
    most: float


def rates(trace: Trace, larger: tuple[int, int]) -> list[Rate]:
    """One a working set, in parts of the pool that is scarce."""
    best = unlimited(trace).hit
    found = []
    for working_set in WORKING_SETS:
        sliding, full = portions(trace, working_set)
        pages = (sliding * larger[0], full * larger[1])
        served, scheduler = serve(trace, pages)
        here, (sliding, full) = served.hit / best, (pool.total for pool in scheduler.allocator.pools)
        strict = here
        if _evicted(scheduler):
            with mock.patch("engine.core.prefix.SPARED", 0.0):
                strict = serve(trace, pages)[0].hit / best
        found.append(Rate(working_set, here, strict, optimum(trace, (sliding, full)).hit / best))
        print(f"{working_set:.0%}: found {here:.3f}, in strict order {strict:.3f}, at most {found[-1].most:.3f}", flush=True)
    return found


def _evicted(scheduler: Scheduler) -> int:
    return scheduler.load().evicted_pages


def first_partings(conversations: int) -> list[Row]:
    """Three conversations a tenant: tokens found, of an infinite cache's, with tails at the ends of turns and without."""
    trace = Trace(conversations, tenants=conversations // 3)
    best, rows = unlimited(trace).hit, []
    for working_set in (0.9, 1.5):
        pages = portions(trace, working_set)
        found, scheduler = serve(trace, pages)
        with mock.patch("engine.core.allocator.turn_ends", return_value=()):
            without, other = serve(trace, pages)
        print(
            f"{working_set:.0%}: found {found.hit / best:.3f}, without tails at the ends of turns {without.hit / best:.3f};"
            f" pages evicted {_evicted(scheduler)} and {_evicted(other)}",
            flush=True,
        )
        case, metric = f"prefix-tenants-{working_set:.0%}", "tokens found, of an infinite cache's"
        rows += [(case, metric, found.hit / best, ""), (f"{case}-ends-of-prompts-only", metric, without.hit / best, "")]
    return rows


def plot(found: dict[str, list[Rate]], file: Path) -> None:
    """A panel for each scarce pool, over the working set in parts of what running sequences leave of it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(11, 3.6), layout="constrained", sharey=True)
    for axes, (name, each) in zip(panels, found.items(), strict=True):
        sets = [100 * rate.working_set for rate in each]
        axes.plot(sets, [rate.most for rate in each], marker=".", linestyle="--", label="Belady's optimum (upper bound)")
        axes.plot(sets, [rate.found for rate in each], marker="o", label="this cache")
        axes.plot(sets, [rate.strict for rate in each], marker=".", linestyle=":", label="strictly least recently used first")
        axes.set(xlabel="working set, % of the pool", title=f"scarce: {name}", ylim=(0, 1.05))
        axes.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel="tokens found, of an infinite cache's")
    panels[0].legend(loc="lower left", fontsize="small")
    figure.savefig(file, dpi=110)


def lookup_ms(tokens: int) -> tuple[float, float]:
    """Milliseconds of finding a prompt of so many tokens that is cached to its last page: keys to be made, and keys known."""
    prompt = array("i", np.random.default_rng(0).integers(0, 200_000, tokens, np.int32).tobytes())
    count = (tokens - 1) // PAGE
    cache, full, sliding = caches(count + 1, TAIL + 1)
    keys: list[bytes] = []
    extend_keys(keys, root_key(""), prompt, PAGE, count)
    cache.insert(keys, full.take(count), sliding.take(TAIL))
    made, known = [], []
    for _ in range(20):
        began = time.perf_counter()
        keys = []
        extend_keys(keys, root_key(""), prompt, PAGE, count)
        between = time.perf_counter()
        assert cache.find(keys).count == count
        made.append(time.perf_counter() - began)
        known.append(time.perf_counter() - between)
    return 1e3 * min(made), 1e3 * min(known)


def admission_ms(tokens: int) -> tuple[float, float]:
    """Core milliseconds, CPU, from the message of such a prompt to its plan in the ring: of one never seen, of one cached whole."""
    groups = kv_groups(parse_config(config(PUBLIC["31b"], "bfloat16")), 4)
    pages = (4000, 2 * tokens // 32 + 4000)
    core, rings = scheduler_of(SchedulerConfig(groups, pages, 4, 2 * tokens, 8192, prefix_cache=True)), Rings()
    prompt = np.random.default_rng(0).integers(0, 200_000, tokens).tolist()
    spent = []
    for number in range(4):
        raw = encode_message(request_of(number, prompt))
        began = time.thread_time()
        core.requests.add(msgspec.convert(decode_front_message(raw), GenerateRequest))
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
        core.requests.drain()
    assert core.requests.counters.hit_tokens == 3 * ((tokens - 1) // 32 * 32)
    return spent[0], min(spent[1:])


def cached_mb(pages: int, each: int = 100) -> float:
    """Megabytes that so many cached pages take, in conversations of `each`, pools included."""
    tracemalloc.start()
    cache, full, sliding = caches(pages + 1, TAIL * (pages // each) + 1)
    for number in range(pages // each):
        keys: list[bytes] = []
        tokens = array("i", np.random.default_rng(number).integers(0, 200_000, each * PAGE, np.int32).tobytes())
        extend_keys(keys, root_key(""), tokens, PAGE, each)
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


def costs() -> list[Row]:
    """What lookups and admissions take."""
    made, known = lookup_ms(131_072)
    print(f"lookup of a cached 128k prompt: {made:.2f} ms with its keys made, {known:.2f} ms with them known")
    cold, hit = admission_ms(131_072)
    print(f"a 128k prompt from its message to its plan in the ring: {cold:.1f} ms, {hit:.1f} ms when it is cached")
    taken = cached_mb(1_000_000)
    print(f"a million cached pages: {taken:.0f} MB")
    return [
        ("prefix-lookup-128k", "keys made and found", made, "ms"),
        ("admission-128k", "core, message to plan", cold, "ms"),
        ("admission-128k-cached", "core, message to plan", hit, "ms"),
        ("prefix-million-pages", "memory of the core", taken, "MB"),
    ]


def main() -> None:
    """All figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates")
    add_record_option(parser)
    args = parser.parse_args()
    rows, found = costs(), {}
    for name, larger in SCARCE.items():
        print(f"scarce: {name}")
        found[name] = rates(Trace(args.conversations), larger)
        metric, case = "tokens found, of an infinite cache's", f"prefix-{name.replace(' ', '-')}"
        rows += [(f"{case}-{rate.working_set:.0%}", metric, rate.found, "") for rate in found[name]]
    print("three conversations a tenant")
    rows += first_partings(args.conversations)
    if args.plot:
        plot(found, args.plot)
    append(rows, args.record, "tests.bench.prefix_cache")


if __name__ == "__main__":
    main()
