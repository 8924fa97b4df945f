"""A rank whose drafts are accepted at a fixed rate: `python -m tests.bench.synthetic_rank MEAN DRAFTS '<BootArgs>'`.

The real worker otherwise. Random weights accept nothing: what drafts take can be timed by them, and what they give cannot.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.children import child_command
from engine.lifeline import BootArgs
from engine.rank import worker
from engine.rank.stages import draft_stage
from tests.support.engine.drafters import accepting
from tests.support.engine.draws import draft_chance


@dataclass(frozen=True)
class Synthetic:
    """A Command of `Group.boot`: steps of `drafts` drafts give `mean` tokens."""

    mean: float
    drafts: int

    def __call__(self, args: BootArgs) -> Sequence[str]:
        """The child's command line."""
        if args.index == args.tp:
            return child_command(args)
        return [sys.executable, "-m", "tests.bench.synthetic_rank", str(self.mean), str(self.drafts), child_command(args)[-1]]


def main() -> None:
    """Patch, then be the worker."""
    share = draft_chance(float(sys.argv.pop(1)), int(sys.argv.pop(1)))
    load = worker.load

    def loaded(*args: object) -> object:
        rank = load(*args)  # type: ignore[arg-type]
        draft_stage.accept = accepting(share, torch.device(rank.device))  # type: ignore[assignment]
        return rank

    worker.load = loaded  # type: ignore[assignment]
    worker.main()


if __name__ == "__main__":
    main()
