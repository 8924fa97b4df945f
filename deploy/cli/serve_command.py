"""The command `quartet serve`."""

import argparse
import io
import os
import signal
import sys
import traceback
from pathlib import Path

from deploy import environment
from deploy.cli.model_files import check_drafter, check_files
from deploy.cli.output import Subparsers, command
from deploy.cli.service_manager import READY, STOPPING, notify
from deploy.launcher import Launch, handling, interrupt
from deploy.settings import read_config, read_settings
from engine.errors import ConfigError, QuartetError

HELP = """\
Starts Ray and Serve on this machine and serves CONFIG until SIGINT or SIGTERM. The first signal drains: no new requests, open
answers finish within --drain seconds; a second one stops at once. Nothing is left over.

  quartet serve deploy/nano.yaml
  quartet serve deploy/gemma4.yaml --port 9000 --drain 120

systemd is told when it serves and when it drains (deploy/systemd/quartet.service, Type=notify).

exit codes: 0 stopped as asked; 1 it could not start or broke; 2 this machine or config cannot serve it"""


def register(commands: Subparsers) -> None:
    summary = "start Ray and serve a config on this machine; Ctrl-C or SIGTERM drains"
    serve = command(commands, "serve", run, summary, HELP, as_json=False)
    serve.add_argument("config", type=Path)
    serve.add_argument("--host", help="127.0.0.1, or 0.0.0.0 for all interfaces; instead of the config's")
    serve.add_argument("--port", type=int, help="instead of the config's")
    serve.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="how long open answers may go on (default: 30)")


def run(args: argparse.Namespace) -> int:
    if not args.drain >= 0:
        raise ConfigError("--drain: expected seconds, 0 or more")
    config = read_config(args.config)
    settings = read_settings(config, str(args.config))
    environment.refuse_kernels_distribution()
    options = config.setdefault("http_options", {})
    if not isinstance(options, dict):
        raise ConfigError(f"{args.config}: http_options: {options!r} is no mapping")
    options.update({name: value for name in ("host", "port") if (value := getattr(args, name)) is not None})
    options.setdefault("host", "127.0.0.1")
    launch = Launch(config, settings, _say)
    code = 1
    with handling(signal.SIG_IGN):  # but where it is interruptible: an end that is broken off leaves processes
        try:
            code = _run(launch, args.drain)
        finally:
            if not launch.end():
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()  # nobody above hears of it any more
                sys.stdout.flush()
                os._exit(code)
    return code


def _run(launch: Launch, drain_s: float) -> int:
    try:
        with handling(interrupt):
            check_drafter(launch.settings)
            check_files(launch.check(), launch.settings.template)
            launch.start()
            _say(_ready_line(launch))
            notify(READY)
            launch.watch()
    except KeyboardInterrupt:
        notify(STOPPING)
        _say("no new requests; open ones may finish. Once more to stop now." if launch.drains else "stopping")
    except ConfigError:
        raise
    except QuartetError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 1
    try:
        with handling(interrupt):
            launch.drain(drain_s)
    except KeyboardInterrupt:
        _say("stopping now")
        launch.cut()
    return 0


def _say(line: str) -> None:
    """After a failed write (full disk, closed pipe) prints nothing more, and serves on."""
    notify(f"STATUS={line}")
    try:
        print(f"quartet: {line}", flush=True)
    except OSError:
        sys.stdout = io.StringIO()


def _ready_line(launch: Launch) -> str:
    settings = launch.settings
    body = f'{{"model": "{settings.name}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    if settings.keys.needed:
        key = "-H 'authorization: Bearer KEY' "
    else:
        key = ""
    return f"ready. Try: curl -N {launch.url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'"
