"""What the prefix cache finds and what it costs: `python -m tests.bench.prefix_cache [--plot FILE]`.

Round robin of conversations at several working sets, with both pools as scarce as each other and with one of them, beside a cache
that never forgets, one that evicts strictly in order, and Belady's optimum; what the second conversation of a tenant finds of its
system prompt.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from engine.core.scheduler import Scheduler
from tests.bench.record import Row, add_record_option, append
from tests.support.engine.conversations import Trace, optimum, portions, serve, unlimited

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


def main() -> None:
    """All figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates")
    add_record_option(parser)
    args = parser.parse_args()
    rows, curves = list[Row](), {}
    for name, larger in SCARCE.items():
        print(f"scarce: {name}")
        curves[name] = rates(Trace(args.conversations), larger)
        metric, case = "tokens found, of an infinite cache's", f"prefix-{name.replace(' ', '-')}"
        rows += [(f"{case}-{rate.working_set:.0%}", metric, rate.found, "") for rate in curves[name]]
    print("three conversations a tenant")
    rows += first_partings(args.conversations)
    if args.plot:
        plot(curves, args.plot)
    append(rows, args.record, "tests.bench.prefix_cache")


if __name__ == "__main__":
    main()
