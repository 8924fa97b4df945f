"""Draws the first token's time against the prompt's length: `python -m tests.bench.ttft PNG [CASE...]`.

From the rows of results.csv that `tests.bench.engine --batches 1x1024 1x2048 ... --record MACHINE` appended, the last of each
length; CASE: `e2b-tp1` and the like, by default all that have five lengths.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from tests.bench.record import RESULTS

_CASE = re.compile(r"(?P<model>.+)-prefill-b1(x(?P<length>\d+))?")


def curves(rows: list[dict[str, str]], cases: list[str]) -> dict[str, dict[int, float]]:
    """Seconds by prompt length, by what ran and where."""
    found = defaultdict[str, dict[int, float]](dict)
    for row in rows:
        match = _CASE.fullmatch(row["case"])
        if match and row["metric"] == "prefill" and (not cases or match["model"] in cases):
            found[f"{match['model']}, {row['machine']}"][int(match["length"] or 1024)] = float(row["value"])
    return {name: curve for name, curve in found.items() if len(curve) >= 5}


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    """A line a curve, both axes logarithmic."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in found.items():
        lengths = sorted(curve)
        axes.plot(lengths, [curve[length] for length in lengths], marker="o", label=name)
    ticks = sorted({length for curve in found.values() for length in curve})
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="time to first token, s")
    axes.set_xticks(ticks, [f"{length / 1024:.3g}k" for length in ticks], minor=False)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(curves(list(csv.DictReader(RESULTS.read_text().splitlines())), sys.argv[2:]), Path(sys.argv[1]))
