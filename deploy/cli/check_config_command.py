"""The command `quartet check-config`."""

import argparse
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from deploy.cli.model_files import check_drafter, check_files
from deploy.cli.output import OK, Subparsers, command, emit
from deploy.edge.edge_settings import LOOPBACK_NAMES, url_host
from deploy.edge.keys.key_file import parse, read
from deploy.models.resolve import is_here
from deploy.placement import drafter_folder
from deploy.settings import ServeConfig, Settings, applications, read_config, read_models
from engine.config import Mtp
from engine.errors import ConfigError
from engine.quantisation import read_quantisation
from engine.weight_formats import NVFP4_NEEDS

HELP = """\
Every key is checked: ours (docs/settings.md lists them), Serve's, and what follows from the model's shape (context, tp).
Nothing is started or downloaded. A model whose config.json is not on this machine is checked by its published shape where
its name is a known one, and said to be unchecked where it is not. Of a folder the headers of its weights, tokenizer, template
and drafter are read, as a replica would, and of a hub id where the hub's cache has them all; no tensor is.

  quartet check-config deploy/gemma4.yaml
  quartet check-config my.yaml --json | jq '.applications[].settings.tp'

exit codes: 0 it can be deployed; 2 it cannot, and the line on stderr names the key"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "check-config", run, "read a config and say what is wrong with it", HELP)
    parser.add_argument("config", type=Path, help="a Serve config: what `serve run` takes")


def run(args: argparse.Namespace) -> int:
    from deploy.serve_schema import check_schema

    source = str(args.config)
    config = read_config(args.config)
    models = read_models(config, source).values()
    check_schema(config, source)
    entries = []
    lines = []
    for app, settings in zip(applications(config, source), models, strict=True):
        try:
            notes = [*all_notes(config, app, settings)]
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        entries.append({"name": app.get("name", ""), "settings": msgspec.to_builtins(settings), "notes": notes})
        lines += [f"{source}: {settings.name}: {msgspec.json.encode(settings).decode()}", *(f"note: {note}" for note in notes)]
    emit(args, {"config": source, "applications": entries}, lines)
    return OK


def all_notes(config: ServeConfig, app: ServeConfig, settings: Settings) -> Iterator[str]:
    http = config.get("http_options") or {}
    yield from deployment_notes(app, settings)
    yield from model_notes(settings)
    yield from key_notes(http, settings)
    yield from node_notes(config, http, settings)
    yield from time_notes(app, http, settings)


def deployment_notes(app: ServeConfig, settings: Settings) -> Iterator[str]:
    for options in app["deployments"]:
        gpus = options.get("ray_actor_options", {"num_gpus": settings.tp}).get("num_gpus") or 0  # Serve takes all or none of ours
        for name in ("max_ongoing_requests", "max_queued_requests"):
            if isinstance(most := options.get(name), int) and 0 <= most < settings.limits.requests:
                yield f"{name} {most} is below limits.requests {settings.limits.requests}: beyond it Serve refuses in its own words"
        if settings.needs_gpus and gpus != settings.tp:
            yield f"num_gpus is {gpus}, but tp needs {settings.tp}: Ray would place replicas where they cannot run"


def node_notes(config: ServeConfig, http: ServeConfig, settings: Settings) -> Iterator[str]:
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        return
    if url_host(str(http.get("host", "127.0.0.1"))) in LOOPBACK_NAMES:
        yield "http_options.host is on loopback: for one machine; a cluster of several is refused (docs/cluster.md)"
    if settings.metrics.host is not None and url_host(settings.metrics.host) in LOOPBACK_NAMES:
        yield f"metrics.host {settings.metrics.host}: Prometheus sees no replica of another machine than its own"


def key_notes(http: ServeConfig, settings: Settings) -> Iterator[str]:
    if not settings.keys.needed:
        if (host := http.get("host", "127.0.0.1")) not in ("127.0.0.1", "localhost", "::1"):
            yield f"no keys, and http_options.host is {host}: anybody who reaches the port may use it"
        return
    if (variable := settings.keys.variable) and variable not in os.environ:
        yield f"keys.variable: {variable} is not set here: the keys were not checked"
        return
    keys = parse(read(settings.keys))
    expired = sum(key.has_expired(datetime.now(UTC)) for key in keys)
    yield f"keys: {len(keys)} of {len({key.name for key in keys})} holders, {expired} of them expired"


def time_notes(app: ServeConfig, http: ServeConfig, settings: Settings) -> Iterator[str]:
    """Notes where Serve's time limits are below limits.request_timeout_s, or missing."""
    deployments = app["deployments"]
    bound = http.get("request_timeout_s")
    own = settings.limits.request_timeout_s
    for options in deployments:
        if (drain := float(options.get("graceful_shutdown_timeout_s", own))) < own:
            yield f"graceful_shutdown_timeout_s {drain:g} is below limits.request_timeout_s {own:g}: downscaling may cut streams"
    if bound is None:
        if any((options.get("autoscaling_config") or {}).get("min_replicas") == 0 for options in deployments):
            yield "request_timeout_s is not in http_options: at 0 replicas (min_replicas) a request may wait for ever"
    elif float(bound) < own:
        yield f"request_timeout_s {float(bound):g} in http_options cuts answers off before limits' own, {own:g}, ends them properly"


def model_notes(settings: Settings) -> Iterator[str]:
    """Check the model's shape and files; notes name what was not checked. ConfigError."""
    from deploy.cli.sizing import configured, known_folder

    if (folder := known_folder(settings.model, settings.revision)) is None:
        yield f"model: {settings.model} is not on this machine and its name is no known one: its shape was not checked"
        return
    check_drafter(settings)
    absent = "is not all on this machine: its files were not checked, and serve downloads what is absent"
    if drafter_folder(settings.mtp, is_here) is False:
        yield f"mtp.model: {settings.mtp.model} {absent}"
        settings = msgspec.structs.replace(settings, mtp=Mtp())
    config = configured(settings, folder)
    if config.weights == "nvfp4":
        yield f"weights nvfp4 needs {NVFP4_NEEDS} on every node: {'; '.join(read_quantisation(folder, 'nvfp4').notes)}"
    if not is_here(settings.model, settings.revision, "tokenizer.json"):
        yield f"model: {settings.model} {absent}"
    else:
        if (template := settings.template) is not None and not template.exists():
            yield f"chat_template: {template} is not on this machine: it was not checked"
            template = None
        check_files(config, template)
