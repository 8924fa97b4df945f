"""The command `quartet doctor`."""

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from cluster.capability import ComputeCapability, probe
from deploy.cli.finding import Findings
from deploy.cli.output import NO, OK, Subparsers, Table, command, emit
from deploy.settings import Settings, http_address, read_config, read_settings
from engine.errors import ConfigError

HELP = """\
Looks, and changes nothing; Ray is not started, and torch is loaded for --kernels alone. `ok` is as it should be, `warn` works with
a cost that the line names, `fail` does not work until you do what the line says.

  quartet doctor
  quartet doctor deploy/gemma4.yaml        also: can this machine hold what the config asks for, and is its chat template sound?
  quartet doctor --as sm100                which attention would run on that GPU with the FlashInfer that is here
  quartet doctor --offline my.yaml         also: what would a start without a network lack?
  quartet doctor --kernels                 also: each of our kernels against plain torch, on this machine's first GPU
  quartet doctor --json | jq '.findings[] | select(.state != "ok")'

exit codes: 0 nothing fails; 1 something does"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "doctor", run, "what this machine can do, and what stands in the way", HELP)
    parser.add_argument("config", type=Path, nargs="?", help="a config that this machine is to serve")
    parser.add_argument("--as", dest="architecture", type=architecture, metavar="SM100", help="choose attention as for that GPU")
    parser.add_argument("--offline", action="store_true", help="name what a start of the config without a network would lack")
    parser.add_argument("--kernels", action="store_true", help="run each of our kernels once on the first GPU")


def run(args: argparse.Namespace) -> int:
    findings = list(look(args.config, args.architecture, kernels=args.kernels, offline=args.offline))
    counts = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warn", "fail")}
    fine = not counts["fail"]
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    rows = [(finding.state, finding.name, " -> ".join(filter(None, (finding.found, finding.advice)))) for finding in findings]
    value = {**counts, "fine": fine, "findings": [asdict(finding) for finding in findings]}
    emit(args, value, [Table(("", "", ""), rows), summary])
    if fine:
        return OK
    return NO


def architecture(text: str) -> ComputeCapability:
    """`sm100`, `sm_100a` or `10.0` as (10, 0)."""
    match = re.fullmatch(r"(?:sm_?(\d{1,2})|(\d{1,2})\.)(\d)[af]?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability such as sm100, sm90 or 12.0")
    return int(match[1] or match[2]), int(match[3])


def look(path: Path | None, other: ComputeCapability | None, *, kernels: bool, offline: bool = False) -> Findings:
    """Run every check. `other`: another GPU's compute capability. ConfigError: `offline` without a
    config."""
    from deploy.cli import machine_checks as checks
    from deploy.cli.offline_checks import offline as offline_checks

    if offline and path is None:
        raise ConfigError("--offline needs a config: it says which model a start would fetch")
    capability = probe()
    config = read_config(path) if path else {}
    if path:
        settings = read_settings(config, str(path))
    else:
        settings = Settings(model="any")
    yield from checks.software()
    yield from checks.devices(capability)
    yield checks.compiler(capability)
    yield from checks.attention(capability, settings, other)
    if kernels:
        yield checks.kernels()
    yield from checks.machine()
    yield checks.api_port(*http_address(config))
    yield checks.ingress()
    yield checks.ray_environment()
    yield from checks.hub()
    if path:
        yield checks.config(path.name, settings, len(capability.gpus))
        yield from checks.templates(settings)
    if offline:
        yield from offline_checks(settings, capability)
