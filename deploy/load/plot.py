"""A picture of a run: how times are distributed and, over several levels, what throughput costs in latency."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.load.generator import Ledger
from deploy.load.problem import LoadError
from deploy.load.summary import TIMES, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = ("ttft", "tpot", "e2e")


def check_plot(path: Path) -> None:
    """Before any load is sent: LoadError where there is no matplotlib, or nowhere to write."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise LoadError("--plot needs matplotlib: pip install -c constraints.txt matplotlib") from error
    if not path.parent.is_dir():
        raise LoadError(f"--plot: {path.parent} is no folder")
    known = ("png", "svg", "pdf")
    if path.suffix.removeprefix(".") not in known:
        raise LoadError(f"--plot: {path.name} is none of {', '.join(f'*.{name}' for name in known)}")
    mpl.use("agg")


def draw(path: Path, title: str, runs: list[tuple[str, Ledger, dict[str, Any]]]) -> None:
    """Write the picture of `runs` (a label, what happened, its summary) to `path`; its ending is the format."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for kind, place in zip(_KINDS, axes.flat, strict=False):
        _distribution(place, kind, runs)
    _trade(axes.flat[3], runs)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _distribution(axes: "Axes", kind: str, runs: list[tuple[str, Ledger, dict[str, Any]]]) -> None:
    """The share of requests that took at most so long."""
    for label, ledger, _ in runs:
        found = times([record for record in ledger.records if record.end == "finished"])[kind]
        if found:
            axes.ecdf([1000 * value for value in found], label=label)
    axes.set(title=TIMES[kind], xlabel="ms", ylabel="share of requests", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize="small")


def _trade(axes: "Axes", runs: list[tuple[str, Ledger, dict[str, Any]]]) -> None:
    """p50 and p99 of the first token against throughput, a point a level."""
    for share in ("p50", "p99"):
        points = [(found["output_tokens_per_s"], 1000 * found["ttft"][share]) for _, _, found in runs if found["ttft"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"first token, {share}")
    for label, _, found in runs:
        if found["ttft"]:
            point = (found["output_tokens_per_s"], 1000 * found["ttft"]["p99"])
            axes.annotate(label, point, (0, 7), textcoords="offset points", ha="center", fontsize="x-small")
    axes.set(title="what throughput costs", xlabel="output tokens a second", ylabel="ms")
    axes.margins(0.15)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize="small")
