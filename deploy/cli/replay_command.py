"""`quartet replay`: runs a recorded plan stream again."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.output import NO, OK, Part, Subparsers, command, emit
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import Device

_SHOWN = 10
LOGPROBS = {"float32": 1e-3, "bfloat16": 0.5}  # how far a reported logprob may lie from one of fp32 on a CPU

HELP = """\
A plan stream (JSON, gzipped: plans and what they gave) is run through one rank, on a GPU by captured graphs; tokens must be the
recorded ones, reported logprobs close.

  quartet replay tests/golden/nano-31b.json.gz
  quartet replay tests/golden/nano-31b.json.gz --device cuda --dtype float32 --no-graphs

exit codes: 0 as recorded; 1 not so; 2 it cannot be run here"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "replay", "run a recorded plan stream again", HELP)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="folder, hub id, nano:, random: or dummy:<member> (default: the recorded one)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--no-graphs", action="store_true", help="decode steps run eagerly on a GPU, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.file.is_file():
        raise ConfigError(f"{args.file}: no such file")
    _check_device(args.device)
    value, lines = _stream(args)
    emit(value, lines, as_json=args.json)
    return OK if value["as_recorded"] else NO


def _check_device(device: "Device") -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no GPU")


def _stream(args: argparse.Namespace) -> tuple[dict[str, Any], list[Part]]:
    from deploy.models.resolve import resolve
    from engine.rank.plan_stream import different_tokens, logprob_error, read_stream
    from engine.rank.replay import replay_stream, stream_config

    stream = read_stream(args.file)
    config = stream_config(stream, resolve(args.model or stream.model), args.device, args.dtype, not args.no_graphs)
    replayed = replay_stream(stream, config)
    different = different_tokens(replayed.results, stream.results)
    error = None if different else logprob_error(replayed.results, stream.results)
    fine = error is not None and error <= LOGPROBS[args.dtype]
    value = {
        "steps": len(stream.plans), "as_recorded": fine, "different": different, "logprob_error": error,
        "state_hash": f"{replayed.state_hash:08x}",
    }  # fmt: skip
    lines: list[Part] = [*different[:_SHOWN]]
    if len(different) > _SHOWN:
        lines.append(f"and {len(different) - _SHOWN} more")
    if error is not None:
        lines.append(f"{len(stream.plans)} steps, every token as recorded, logprobs within {error:.1e}")
    return value, [*lines, f"state hash {value['state_hash']}"]
