"""Where the time of a decode step goes, without Ray and without a core: `python -m tests.bench.profile --help`."""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from deploy.cli.output import CANNOT, OK, Part, Table, emit
from engine.errors import ConfigError
from tests.bench.profiling.decode_times import StepTime
from tests.bench.profiling.session import ProfileRequest, profiles, step_times
from tests.bench.profiling.step_profile import StepProfile
from tests.nano.random_models import model_folder

SWEEP_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWEEP_CONTEXTS = (1024, 8192, 32768, 131072)

HELP = """\
Weights and contexts are random and made on the device; nothing is downloaded but a config, and nothing is served.

  profile dummy:31b --tp 4                          four ranks on four GPUs: a step's stages, batch 1, context 1024
  profile dummy:31b --tp 4 --loopback               one rank's shard on one GPU, its sums looped back: all but the wires
  profile dummy:26b-a4b --batch 1 32 --trace t.json    and torch's traces, for Perfetto: t-b1-c1024.json, t-b32-c1024.json
  profile dummy:31b --tp 4 --loopback --sweep --csv tpot.csv     step time by batch and context
  profile random:31b --device cpu --dtype float32   a rehearsal on a nano shape, by the wall clock

A stage is what layers of one kind do in one module. us: of each of its kernels, from the end of the one before to its own end, so
that stages add up to the step. floor: its weights, K and V at the read rate.
--sweep: launch is a step through the runner, two out at a time; graph the captured step replayed back to back. Batches and
contexts whose pages do not fit beside the others are left out, and named.

exit codes: 0 measured; 2 it cannot run like this"""


def _parser() -> argparse.ArgumentParser:
    about = "The stages of a decode step, or its time by batch and context."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tests.bench.profile", description=about, epilog=HELP, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    parser.add_argument("model", help="a folder, a hub id, nano:, random: or dummy:<member>; only its config is read")
    where = parser.add_argument_group("where")
    where.add_argument("--tp", type=int, default=1, help="ranks (default: %(default)s)")
    where.add_argument("--loopback", action="store_true", help="one rank of them, on one device")
    where.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    where.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    what = parser.add_argument_group("what")
    what.add_argument("--batch", type=int, nargs="+", metavar="N", help="sequences decoding (default: 1; sweep: 1 to 256)")
    what.add_argument("--context", type=int, nargs="+", metavar="N", help="tokens of each (default: 1024; sweep: 1k to 128k)")
    what.add_argument("--steps", type=int, default=64, help="steps timed (default: %(default)s)")
    what.add_argument("--prefill-budget", type=int, default=512, help="of the engine that is measured (default: %(default)s)")
    what.add_argument("--debug-pages", action="store_true", help="with the check of page tables")
    what.add_argument("--read-rate", type=float, metavar="TB/S", help="of the floors (default: H200's best 4.56, or measured)")
    what.add_argument("--sweep", action="store_true", help="times of whole steps instead of stages")
    out = parser.add_argument_group("output")
    out.add_argument("--trace", type=Path, metavar="FILE", help="write torch's trace of the steps, a file a batch and context")
    out.add_argument("--csv", type=Path, metavar="FILE", help="write the sweep as CSV")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        _run(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CANNOT
    return OK


def _run(args: argparse.Namespace) -> None:
    _check_outputs(args)
    request = _request(args)
    if args.sweep:
        _sweep(args, request)
    else:
        _stages(args, request)


def _check_outputs(args: argparse.Namespace) -> None:
    """Before anything is measured: ConfigError where an output has no place, or does not belong to what is measured."""
    for name, allowed in (("trace", not args.sweep), ("csv", args.sweep)):
        path: Path | None = getattr(args, name)
        if path is not None and not allowed:
            raise ConfigError(f"--{name} goes {'with' if name != 'trace' else 'without'} --sweep")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name}: {path.parent} is no folder")


def _request(args: argparse.Namespace) -> ProfileRequest:
    _check_device(args)
    batches = args.batch or (SWEEP_BATCHES if args.sweep else (1,))
    contexts = args.context or (SWEEP_CONTEXTS if args.sweep else (1024,))
    if min(*batches, *contexts, args.tp) < 1:
        raise ConfigError("--batch, --context and --tp begin at 1")
    return ProfileRequest(
        folder=model_folder(args.model), tp=args.tp, loopback=args.loopback, device=args.device, dtype=args.dtype,
        batches=tuple(batches), contexts=tuple(contexts), steps=args.steps, prefill_budget=args.prefill_budget,
        read_rate=args.read_rate and 1e12 * args.read_rate, debug_pages=args.debug_pages, trace=args.trace,
    )  # fmt: skip


def _check_device(args: argparse.Namespace) -> None:
    """ConfigError where the GPUs are not there."""
    if args.device == "cuda":
        present, needed = torch.cuda.device_count(), 1 if args.loopback else args.tp
        if present < needed:
            raise ConfigError(f"{needed} GPUs are asked for, this machine has {present}; --device cpu rehearses on nano shapes")


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- stages


def _stages(args: argparse.Namespace, request: ProfileRequest) -> None:
    measured = profiles(request, report)
    shown = [part for profile in measured for part in parts(profile)]
    emit([{**asdict(profile), "floor_ms": _floor_ms(profile)} for profile in measured], shown, as_json=args.json)


def parts(profile: StepProfile) -> Iterator[Part]:
    """The table of one profile, and its sums."""
    columns = ("stage", "kernels", ">count", ">us each", ">us", ">MB", ">floor us", ">share")
    rows = [
        (
            stage.name, _short(stage.kernels), str(stage.count), f"{stage.us / stage.count:.2f}", f"{stage.us:.1f}",
            f"{stage.bytes / 1e6:.1f}" if stage.bytes else "", f"{stage.floor_us:.1f}" if stage.bytes else "",
            f"{1e-3 * stage.us / profile.step_ms:.1%}",
        )
        for stage in profile.stages
    ]  # fmt: skip
    yield f"batch {profile.batch}, context {profile.context}"
    yield Table(columns, rows)
    yield f"step {profile.step_ms:.3f} ms; floor {_floor_ms(profile):.3f} ms, of bytes at {profile.read_rate / 1e12:.2f} TB/s"


def _floor_ms(profile: StepProfile) -> float:
    return 1e-3 * sum(stage.floor_us for stage in profile.stages)


def _short(kernels: Sequence[str]) -> str:
    """The first names, those of C++ without types."""
    names = [kernel.partition("<")[0].removeprefix("void ") for kernel in kernels[:3]]
    return " ".join(names) + (f" +{len(kernels) - 3}" if len(kernels) > 3 else "")


# -- sweep


def _sweep(args: argparse.Namespace, request: ProfileRequest) -> None:
    times = step_times(request, report)
    columns = (">batch", ">context", ">launch ms", ">graph ms", ">floor ms")
    rows = [tuple(_cell(value) for value in asdict(time).values()) for time in times]
    emit([asdict(time) for time in times], ["milliseconds a step", Table(columns, rows)], as_json=args.json)
    if args.csv is not None:
        _write_csv(args.csv, times)


def _cell(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def _write_csv(path: Path, times: Sequence[StepTime]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(times[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in asdict(time).items()} for time in times)


if __name__ == "__main__":
    sys.exit(main())
