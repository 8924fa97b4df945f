"""The command line `quartet`. Parsing imports neither torch nor ray."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.cli import check_config_command, doctor_command, env_command, key_command, plan_command, serve_command
from deploy.cli.output import CANNOT
from engine.errors import ConfigError

COMMANDS = (serve_command, check_config_command, doctor_command, plan_command, env_command, key_command)

HELP = """\
from nothing to tokens:
  quartet doctor                               what this machine has and lacks
  quartet plan --model 31b --tp 4 --gpu h200   will it fit, and how much runs at once
  quartet check-config deploy/gemma4.yaml      what is wrong with a config
  quartet serve deploy/nano.yaml               start Ray and serve; Ctrl-C drains
  quartet env --for head deploy/gemma4.yaml    what `ray start` needs in its environment on a standing cluster
  quartet key new --name alice                 an API key, and the entry of it for the file of keys

`quartet COMMAND --help` has examples. Every command but serve takes --json.
exit codes: 0 as asked; 1 trouble, or the answer is no; 2 it cannot run like this, said in one line on stderr"""


def main(arguments: Sequence[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # its starter closed it: no file or socket may get its number
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the end
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("quartet", description="Quartet: Gemma 4 on Ray Serve.", epilog=HELP, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in COMMANDS:
        module.register(commands)
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal has no letters for
    try:
        code: int = args.run(args)
    except (ConfigError, OSError) as error:
        if getattr(error, "filename", error) is None:  # of no file: a bug, not the user's
            raise
        print(f"quartet: {error}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt:
        return 130  # as a shell counts a SIGINT
    return code
