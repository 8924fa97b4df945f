"""Kernels at one rank's real shapes: `python -m tests.bench.kernels`. One JSON object a line.

    --model, --tp, --rows     whose shapes (31b at 4), and how many rows of x
    --sweep                   every candidate tile instead of the committed one; the table at the end is what to commit
    --dry                     small shapes on the CPU under Triton's interpreter: that the run would reach its end

Needs torch, triton and the checkout. Compiles ahead in as many processes as there are cores, then times by graph replay.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton

from kernels.launch import INTERPRET
from tests.bench.gemms import committed, sweep
from tests.bench.timing import Case, precompile_all, try_case
from tests.nano.model_shapes import PUBLIC
from tests.nano.model_shapes import ModelShape as Model
from tests.support.engine.products import products

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="31b", choices=sorted(PUBLIC))
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32, 64, 100])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--target", default="9.0", help="compute capability to compile for ahead of time")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.dry and not INTERPRET:
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tests.bench.kernels", *sys.argv[1:]])
    model = small(PUBLIC[options.model], options.tp) if options.dry else PUBLIC[options.model]
    for row in bench(model, options):
        print(json.dumps(row), flush=True)


def small(model: Model, tp: int) -> Model:
    """The model's structure at a size that the interpreter can multiply."""
    return replace(model, groups=1, sliding=1, kv_shared=0, hidden=96, mlp=32 * tp, heads=tp, kv_heads=tp, vocab=48 * tp)


def bench(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """A row a case."""
    chosen = [product for product in products(model, options.tp) if options.only in product.name]
    cases = list((sweep if options.sweep else committed)(chosen, options.rows))
    device = yield from prepare(cases, options)
    rows = []
    for case in cases:
        rows.append(try_case(case, device))
        yield rows[-1]
    yield from best_tiles(rows) if options.sweep else ()


def prepare(cases: Iterable[Case], options: argparse.Namespace) -> Generator[Row, None, torch.device]:
    """Compiles for the GPU ahead of its first use; yields how long that took, and returns the device."""
    torch.manual_seed(0)
    if options.dry:
        return torch.device("cpu")
    major, minor = (int(part) for part in options.target.split("."))
    began = time.monotonic()
    built = precompile_all((node for case in cases for node in case.nodes((major, minor))), (major, minor), options.workers)
    yield {"compiled": built, "seconds": round(time.monotonic() - began, 1)}
    found = torch.cuda.get_device_capability()
    if found != (major, minor):
        raise SystemExit(f"this GPU is {found[0]}.{found[1]}: --target {found[0]}.{found[1]}")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    return torch.device("cuda")


def best_tiles(rows: list[Row]) -> Iterator[Row]:
    """For each product and number of rows the fastest tile, with cuBLAS's time beside it."""
    timed = [row for row in rows if "us" in row]
    for name, count in dict.fromkeys((row["case"], row["rows"]) for row in timed):
        mine = [row for row in timed if (row["case"], row["rows"]) == (name, count)]
        library = [row["us"] for row in mine if row["kernel"] == "cublas"]
        best = min((row for row in mine if row["kernel"] != "cublas"), key=lambda row: row["us"], default=None)
        if best is not None:
            kept = {key: best[key] for key in ("tile", "us", "floor_us", "tb_per_s")}
            yield {"best": name, "rows": count, **kept, "cublas_us": min(library, default=None)}


if __name__ == "__main__":
    main()
