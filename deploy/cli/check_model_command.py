"""`quartet check-model`: looks at a checkpoint folder as a replica would when it loads it, and loads nothing."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.finding import Finding, emit_findings
from deploy.cli.output import NO, OK, Subparsers, command
from engine.errors import CheckpointError

if TYPE_CHECKING:
    from engine.geometry import Geometry

HELP = """\
Reads config.json, the tokenizer, the chat template and the headers of the safetensors files; torch is not loaded, and no tensor is
read. `ok` and `warn` load; `fail` would be refused, for the reason that the line gives.

  quartet check-model ~/checkpoints/gemma-4-31B-it
  quartet check-model ./finetune --json | jq '.findings[] | select(.state == "fail")'

exit codes: 0 it would be loaded; 1 it would be refused"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "check-model", "what a checkpoint folder holds, and whether it would be loaded", HELP)
    parser.add_argument("folder", type=Path, help="a folder with config.json and *.safetensors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints every finding; 1 where one of them is a refusal."""
    findings = list(look(args.folder.expanduser()))
    good = not any(finding.state == "fail" for finding in findings)
    verdict = f"{args.folder}: {'can be loaded' if good else 'would be refused'}"
    emit_findings(findings, {"folder": str(args.folder), "good": good}, verdict, as_json=args.json)
    return OK if good else NO


def look(folder: Path) -> Iterator[Finding]:
    """Everything that a replica would read, in its order; what cannot be read has no findings behind it."""
    from engine.geometry import read_geometry

    try:
        geometry = read_geometry(folder)
    except CheckpointError as error:
        yield Finding("config", "fail", str(error))
    else:
        size = f"{len(geometry.layers)} layers, hidden size {geometry.hidden}, {geometry.vocab} tokens"
        yield Finding("model", "ok", f"{member(geometry)}: {size}, context {geometry.max_position}")
        yield from _tensors(folder, geometry)
    yield from _text(folder)


def member(geometry: "Geometry") -> str:
    """The public shape that it has."""
    from deploy.models.public_shapes import PUBLIC, config
    from engine.geometry import parse_config

    for name, shape in PUBLIC.items():
        public = parse_config(config(shape, "bfloat16"))
        if (public.hidden, public.layers, public.moe) == (geometry.hidden, geometry.layers, geometry.moe):
            return f"Gemma 4 {name}"
    return "a Gemma 4 of a shape of its own"


def _tensors(folder: Path, geometry: "Geometry") -> Iterator[Finding]:
    from engine.rank.load.slices import elements, pieces
    from engine.rank.load.tensor_files import checked, headers
    from engine.rank.load.tensor_table import HEAD
    from engine.rank.models.gemma4_weights import TENSORS
    from engine.weight_formats import weight_format

    try:
        saved, _ = headers(folder, TENSORS, geometry)
        needed = checked(folder, pieces(TENSORS, geometry, weights=weight_format(folder)), TENSORS, geometry)
    except CheckpointError as error:
        yield Finding("tensors", "fail", str(error))
        return
    dtypes = sorted({header.dtype for header in needed.values()})
    count = elements(TENSORS, geometry)
    files = {header.path for header in saved.values()}
    yield Finding("format", "ok", f"safetensors of {', '.join(dtypes)}, {len(files)} files")
    size = sum(path.stat().st_size for path in files) / 1e9
    yield Finding("size", "ok", f"{size:.2f} GB; the text model has {count:,} parameters in {len(needed)} tensors")
    if HEAD in saved:
        size = 2 * math.prod(saved[HEAD].shape) / 1e9
        what = f"dropped if it equals the embedding, else loaded beside it, {size:.2f} GB in bf16"
        yield Finding("head", "ok", f"{saved[HEAD].name} is saved: {what}")


def _text(folder: Path) -> Iterator[Finding]:
    from deploy.cli.machine_checks import template
    from engine.front.text import TextProcessor

    try:
        text = TextProcessor.load(folder)
    except CheckpointError as error:
        yield Finding("text", "fail", str(error))
        return
    yield Finding("tokenizer", "ok", f"{text.vocab_size} ids")
    if text.template is None:
        yield Finding("template", "warn", "none", "only raw prompts are served; name a file as chat_template")
    else:
        yield template("template", text.template)
