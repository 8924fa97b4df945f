"""Draws lines of `tests.bench.step`, of several contexts: `python -m tests.bench.tpot LINES PNG TITLE`."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def draw(rows: list[dict[str, float]], path: Path, title: str) -> None:
    """Time per output token against batch, a line a context; its floor dashed in the same colour."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for context in sorted({row["context"] for row in rows}):
        line = [row for row in rows if row["context"] == context]
        batches = [row["batch"] for row in line]
        (drawn,) = axes.plot(batches, [row["launch_ms"] for row in line], marker="o", label=f"context {context}")
        axes.plot(batches, [row["floor_ms"] for row in line], linestyle="--", color=drawn.get_color(), alpha=0.6)
    axes.set_xscale("log", base=2)
    batches = sorted({row["batch"] for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(title=f"{title}; dashed: a step's bytes at the read rate", xlabel="batch", ylabel="time per output token, ms")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(list(map(json.loads, Path(sys.argv[1]).read_text().splitlines())), Path(sys.argv[2]), sys.argv[3])
