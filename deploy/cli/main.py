"""The command line `quartet`, which `python -m deploy.cli` is as well: one parser, and the command that serves.

The other commands are modules beside this one. Neither torch nor ray is imported to parse a line or to print help.

Exit codes: 0 ended as asked; 1 it ran into trouble, or the answer is no; 2 it cannot run like this, said in one line.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from deploy import environment
from deploy.cli import (
    bench_command,
    check_config_command,
    dashboards_command,
    doctor_command,
    metrics_command,
    plan_command,
)
from deploy.cli.output import CANNOT, command
from deploy.launch import Interrupted, Launch, interruptible
from deploy.scaling import check_policies
from deploy.settings import Settings, read_config, read_settings
from engine.errors import CheckpointError, ConfigError, QuartetError

INTERRUPTED = 130  # as a shell counts a SIGINT
_GOODBYE = "no new requests; open ones may finish. Once more to stop now."

TEACH = """\
from nothing to tokens:
  quartet doctor                               what this machine has and lacks
  quartet plan --model 31b --tp 4 --gpu h200   will it fit, and how much runs at once
  quartet check-config deploy/gemma4.yaml      what is wrong with a config
  quartet serve deploy/nano.yaml               start Ray and serve; Ctrl-C drains
  quartet bench --concurrency 1 8 32           load, percentiles, and whether every request is accounted for
  quartet metrics                              the main figures, live

`quartet COMMAND --help` teaches each. Every command but serve takes --json.
exit codes: 0 as asked; 1 trouble, or the answer is no; 2 it cannot run like this, said in one line on stderr"""

_SERVE = """\
Starts Ray and Serve on this machine and serves CONFIG until SIGINT or SIGTERM. The first signal drains: no new requests, open
answers finish within --drain seconds; a second one stops at once. Nothing is left behind.

  quartet serve deploy/nano.yaml
  quartet serve deploy/gemma4.yaml --port 9000 --drain 120

exit codes: 0 stopped as asked; 1 it could not start or broke; 2 this machine or config cannot serve it"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except (ConfigError, CheckpointError) as error:
        print(f"quartet: {error}", file=sys.stderr)
        return CANNOT
    except BrokenPipeError:  # `quartet ... | head`: nobody reads on, and the interpreter must not complain when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Quartet: Gemma 4 on Ray Serve."
    parser = argparse.ArgumentParser(prog="quartet", description=about, epilog=TEACH, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="command")
    summary = "start Ray and serve a config on this machine; Ctrl-C or SIGTERM drains"
    serve = command(commands, "serve", summary, _SERVE, as_json=False)
    serve.add_argument("config", type=Path)
    serve.add_argument("--host", help="instead of the config's")
    serve.add_argument("--port", type=int, help="instead of the config's")
    serve.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="how long open answers may go on at the end")
    serve.set_defaults(run=_serve)
    for module in (check_config_command, doctor_command, plan_command, bench_command, metrics_command, dashboards_command):
        module.register(commands)
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = read_config(args.config)
    settings = read_settings(config, str(args.config))
    check_policies(config, str(args.config))
    environment.refuse_kernels_distribution()
    options = config.setdefault("http_options", {})
    options.update({name: value for name in ("host", "port") if (value := getattr(args, name)) is not None})
    options.setdefault("host", "127.0.0.1")
    launch = Launch(config, settings, lambda line: print(f"quartet: {line}", flush=True))
    code = 1
    try:
        code = _run(launch, settings[0], args.drain)
    finally:
        if not launch.end():
            sys.stdout.flush()
            os._exit(code)
    return code


def _run(launch: Launch, settings: Settings, drain_s: float) -> int:
    """Start, wait for a signal, drain; a second signal ends the drain."""
    try:
        with interruptible():
            launch.start()
            with interruptible():  # Ray has put its own handler in place of ours
                print(_ready_line(launch, settings), flush=True)
                threading.Event().wait()
    except Interrupted as signal:
        print(f"quartet: {signal}: {_GOODBYE if launch.drains else 'stopping'}", flush=True)
    except ConfigError:
        raise
    except QuartetError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 1
    try:
        with interruptible():
            launch.drain(drain_s)
    except Interrupted:
        print("quartet: stopping now", flush=True)
        launch.cut()
    return 0


def _ready_line(launch: Launch, settings: Settings) -> str:
    host, port = launch.address
    body = f'{{"model": "{settings.name}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    url = f"http://{host}:{port}/v1/chat/completions"
    return f"quartet: ready. Try: curl -N {url} -H 'content-type: application/json' -d '{body}'"
