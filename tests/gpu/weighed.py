"""The real worker, which says what its device holds: `python -m tests.gpu.weighed FOLDER '<BootArgs>'`.

    started   a CUDA context and nothing else     ready     KV pools stand, the first plan may come
    loaded    the KV budget is taken from here    stopped   plans were run

Each is a file FOLDER/<rank>.<stage>.json; where the device is a CPU there is none.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from cluster.children import boot_json, child_command
from engine.config import EngineConfig
from engine.lifeline import BootArgs
from engine.rank import worker

STAGES = ("started", "loaded", "ready", "stopped")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. total, used: of the device, by CUDA; allocated, cached: of torch's allocator; peak: most since the stage before."""

    total: int
    used: int
    allocated: int
    cached: int
    peak: int


@dataclass(frozen=True)
class Weighed:
    """A Command of `Group.boot`: every rank writes its stages into `folder`."""

    folder: Path

    def __call__(self, args: BootArgs) -> Sequence[str]:
        """The child's command line."""
        if args.role == "core":
            return child_command(args)
        return [sys.executable, "-m", "tests.gpu.weighed", str(self.folder), boot_json(args)]

    def stage(self, rank: int, name: str) -> Stage:
        """As the rank wrote it."""
        return msgspec.json.decode(_path(self.folder, rank, name).read_bytes(), type=Stage)


def weigh() -> Stage:
    """The current device at this moment; starts the count of the next peak."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    allocated, cached = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return Stage(total=total, used=total - free, allocated=allocated, cached=cached, peak=peak)


def plant(folder: Path) -> None:
    """The worker's own functions, with a look at the scales before or behind them."""

    def note(stage: str) -> None:
        if torch.cuda.is_available():
            _path(folder, torch.cuda.current_device(), stage).write_bytes(msgspec.json.encode(weigh()))

    load, kv_bytes, run = worker.load, worker.kv_bytes, worker.Worker.run

    def weighed_load(config: EngineConfig, args: BootArgs) -> worker.Rank:
        if config.device == "cuda":
            torch.cuda.set_device(args.index)
        note("started")
        return load(config, args)

    def weighed_bytes(rank: worker.Rank) -> int:
        note("loaded")
        return kv_bytes(rank)

    def weighed_run(self: worker.Worker) -> None:
        note("ready")
        run(self)
        note("stopped")

    worker.load = weighed_load
    worker.kv_bytes = weighed_bytes
    worker.Worker.run = weighed_run  # type: ignore[method-assign]


def _path(folder: Path, rank: int, stage: str) -> Path:
    return folder / f"{rank}.{stage}.json"


def main() -> None:
    """Patch, then be the worker."""
    plant(Path(sys.argv.pop(1)))
    worker.main()


if __name__ == "__main__":
    main()
