"""The command `quartet env`."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from deploy import environment
from deploy.cli.output import OK, Subparsers, command, emit
from deploy.settings import http_address, read_config, read_models

HELP = """\
`quartet serve` starts Ray with these variables itself. Where `ray start` starts it, set them on every node before; without them
errors, limits, keys and the addresses of clients are Ray Serve's own, and streams go through its Python proxy. CONFIG tells the
guard around Serve its limits and keys. Run it where the paths are those of the node: on the node, or in its image.

  settings="$(quartet env --for head deploy/gemma4.yaml)" && eval "$settings" && ray start --head
  settings="$(quartet env --for node deploy/gemma4.yaml)" && eval "$settings" && ray start --address HEAD:6379
  quartet env --for node --format systemd deploy/gemma4.yaml > /etc/quartet/node.env
  quartet env --for node --format kubernetes deploy/gemma4.yaml

exit codes: 0 printed; 2 the config cannot be served"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "env", run, "the environment for `ray start`, for a shell, systemd or Kubernetes", HELP)
    parser.add_argument("config", type=Path, nargs="?", help="the config that the cluster is to serve")
    parser.add_argument("--for", dest="node", choices=("head", "node"), required=True, help="the head node, or any other")
    parser.add_argument("--format", choices=FORMATS, default="shell", help="shell (the default): export lines for eval")


def run(args: argparse.Namespace) -> int:
    values = environment.for_ray_start(head=args.node == "head")
    if args.config is not None:
        config = read_config(args.config)
        host, _ = http_address(config)
        values |= environment.guard(read_models(config, str(args.config)), host)
    if args.format == "shell":  # evaluated on the node itself; the other formats are carried to machines of other sizes
        values |= environment.haproxy_sizes()
    emit(args, values, FORMATS[args.format](values))
    return OK


def shell_lines(values: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items()]


def systemd_lines(values: Mapping[str, str]) -> list[str]:
    return [f'{name}="{_escaped(value)}"' for name, value in values.items()]


def _escaped(value: str) -> str:
    return "".join(f"\\{character}" if character in '\\"`$' else character for character in value)


def kubernetes_lines(values: Mapping[str, str]) -> list[str]:
    """For a container's `env:`, where `$$` is a dollar and `$(NAME)` a variable."""
    import yaml

    entries = [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]
    return yaml.safe_dump(entries, sort_keys=False, width=1 << 20).splitlines()


FORMATS = {"shell": shell_lines, "systemd": systemd_lines, "kubernetes": kubernetes_lines}
