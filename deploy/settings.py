"""The typed arguments of an application, `args:` in the YAML."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from deploy.edge.bodies.unique_keys import UniqueKeys
from deploy.edge.edge_settings import (
    MODELS,
    AbsolutePath,
    Count,
    Host,
    KeySettings,
    LimitSettings,
    LogSettings,
    MediaSettings,
    Name,
    TracingSettings,
)
from deploy.routing import ConversationSettings
from engine.config import Duration, EngineSettings, LoadFormat, Thinking, ToolGrammar
from engine.errors import ConfigError
from engine.protocol import FrozenStruct

IMPORT_PATH = "deploy.app:build"
DEPLOYMENT = "Quartet"
PREFIX = re.compile(rf"{MODELS}[A-Za-z0-9._-]+")
LONGEST_S = 2_147_483  # 24 days: C counts milliseconds in 32 bits, and so does HAProxy
LARGEST = 1 << 42  # 4 TiB, or so many of anything: more is a slip
ServeConfig = dict[str, Any]  # all of a Serve config, or a part of it, as the YAML has it

Port = Annotated[int, Meta(ge=0, le=65535)]


class DiscoverySettings(FrozenStruct):
    """The cluster's http_sd endpoint, on the head node. A cluster's first replica decides."""

    enabled: bool = True
    """list the replicas' exporters for Prometheus, and share quotas of API keys and fair shares among the replicas; false: each
    replica counts them for itself"""
    host: Host = "127.0.0.1"
    """address of the list; 127.0.0.1 if the head node does not have it"""
    port: Port = 9464
    """port of the list; if it is taken, a free one"""


class MetricsSettings(FrozenStruct):
    """The exporter's address, and the objectives it judges by."""

    host: Host | None = None
    """address of each replica's exporter; none: the node's address in Ray, which is loopback under the CLI"""
    port: Port = 0
    """port of the exporter; 0: a free one, written to the log and to /health/ready"""
    on_api: bool = False
    """answer GET /metrics on the API's port, too, without a key: where it has one replica, as in a pod of its own, whose
    gauges routers read there"""
    ttft_objective_s: Duration = 1.0
    """longest time to the first token that counts as good in quartet_slo_requests_total"""
    tpot_objective_s: Duration = 0.05
    """longest mean time to a later token that counts as good in quartet_slo_requests_total"""
    discovery: DiscoverySettings = DiscoverySettings()


class Settings(EngineSettings, kw_only=True):
    """One deployment of one model: these keys, and those of EngineSettings."""

    model: Annotated[str, Meta(min_length=1)]
    """a local folder, a Hugging Face hub id, nano:<member> (trained, part of the checkout: e2b, 26b-a4b, 31b) or dummy:<member>
    (a public shape with random weights)"""
    revision: str | None = None
    """revision of a hub id"""
    served_model_name: Name | Annotated[tuple[Name, ...], Meta(min_length=1, max_length=32)] | None = None
    """what clients call it, or a list of such names, of which answers have the first; none: the last part of `model`"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if NVML shows a GPU to this replica"""
    load_format: LoadFormat | None = None
    """dummy: random weights; none: as `model` says"""
    max_queue: Annotated[int, Meta(ge=0)] | None = None
    """choices that may wait in addition to max_seqs; none: 256, or four times max_seqs if that is more"""
    max_queue_tokens: Count | None = None
    """prompt tokens that may wait; one prompt is always allowed; none: 32 prompts of max_len"""
    max_tokens: Count | None = None
    """default of a chat completion; none: what the context has left"""
    tool_grammar: ToolGrammar = "strict"
    """what is enforced in tool calls that the model begins by itself; strict: names and schemas (only names for schemas that
    cannot be enforced); names; off: nothing. A tool_choice, and a tool's own strict: true, are always enforced"""
    chat_template: AbsolutePath | None = None
    """a chat template, on every node with replicas; none: the checkpoint's"""
    thinking: Thinking = "auto"
    """whether the model thinks if a request does not say; auto: the chat template decides"""
    metrics: MetricsSettings = MetricsSettings()
    limits: LimitSettings = LimitSettings()
    conversations: ConversationSettings = ConversationSettings()
    media: MediaSettings = MediaSettings()
    keys: KeySettings = KeySettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    adapter_folder: AbsolutePath | None = None
    """folder, on every node with replicas, below which /v1/load_lora_adapter may load adapters, with API keys by those that have
    the right adapters; needs max_adapters; none: it loads none"""
    wait_for_nodes: bool = False
    """do not refuse when no node can hold a group now: the cluster starts GPU nodes on demand"""
    build: str = ""
    """any string; a change makes Serve replace the replicas (it compares no code)"""

    @property
    def engine(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in EngineSettings.__struct_fields__}

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def served(self) -> tuple[str, ...]:
        """Allowed values of a request's `model`."""
        return (*self.names, *self.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        if isinstance(self.served_model_name, str):
            return (self.served_model_name,)
        return self.served_model_name or (self.model.rstrip("/").rpartition("/")[2],)

    @property
    def template(self) -> Path | None:
        if self.chat_template:
            return Path(self.chat_template)
        return None

    @property
    def capacity(self) -> int:
        """Choices of a replica, running or waiting."""
        return self.max_seqs + (max(256, 4 * self.max_seqs) if self.max_queue is None else self.max_queue)

    @property
    def queue_tokens(self) -> int:
        if self.max_queue_tokens is None:
            return 32 * self.max_len
        return self.max_queue_tokens

    @property
    def needs_gpus(self) -> bool:
        """`auto` means GPUs, except for a nano model."""
        return self.device == "cuda" or (self.device == "auto" and not self.model.startswith("nano:"))

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Self:
        """ConfigError names every wrong key."""
        wrong: list[str] = []
        settings = _read(cls, args, "", wrong)
        if settings is None:
            raise ConfigError("; ".join(wrong))
        return settings


Struct = TypeVar("Struct", bound=msgspec.Struct)


def _read(kind: type[Struct], given: Any, path: str, wrong: list[str]) -> Struct | None:
    """The settings in a mapping; None, with lines in `wrong`, if a key is wrong."""
    if not isinstance(given, Mapping):
        wrong.append(f"{path}: expected a mapping, not {given!r:.80}")
        return None
    before = len(wrong)
    values = {}
    for field in msgspec.structs.fields(kind):
        key = f"{path}.{field.name}" if path else field.name
        if get_origin(field.type) is Annotated:
            inner = get_args(field.type)[0]
        else:
            inner = field.type
        if field.name not in given:
            wrong += [f"{key}: is required"] if field.required else []
        elif isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            values[field.name] = _read(inner, given[field.name], key, wrong)
        else:
            values[field.name] = _value(field.type, given[field.name], key, wrong)
    wrong += [f"{path}.{key}: unknown setting (docs/settings.md)".lstrip(".") for key in given if key not in kind.__struct_fields__]
    try:
        if len(wrong) == before:
            return kind(**values)
        return None
    except ValueError as error:
        wrong.append(f"{path}: {error}")
        return None


def _value(kind: Any, given: Any, key: str, wrong: list[str]) -> Any:
    choices = _choices(kind)
    if isinstance(given, bool) and choices:
        given = "on" if given else "off"  # YAML reads these words as booleans
    try:
        value = msgspec.convert(given, kind, strict=False)
        most = LONGEST_S if isinstance(value, float) else LARGEST
        if isinstance(value, int | float) and value > most:
            raise msgspec.ValidationError(f"Expected {type(value).__name__} <= {most}")
    except msgspec.ValidationError as error:
        expectation = str(error).partition(", got ")[0].removeprefix("Expected ").replace("`", "")
        expected = " or ".join([*choices, *([expectation] if "=" in expectation or not choices else [])])
        wrong.append(f"{key}: expected {expected}, not {given!r:.80}")
        return None
    return value


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(choice for inner in get_args(kind) for choice in _choices(inner))


class _Loader(UniqueKeys, yaml.SafeLoader):
    pass


def read_config(path: Path) -> ServeConfig:
    """The mapping that `serve run` takes. ConfigError: no mapping; OSError."""
    try:
        value = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: an impossible day, or bytes that are not UTF-8
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict) or not isinstance(value.get("applications"), list):
        raise ConfigError(f"{path}: a Serve config has a list of applications")
    return value


def applications(config: ServeConfig, source: str) -> list[ServeConfig]:
    """Our applications, one per model, that at `/` first. ConfigError."""
    ours = [app for app in config["applications"] if isinstance(app, dict) and app.get("import_path") == IMPORT_PATH]
    ours.sort(key=lambda app: app.get("route_prefix", "/") != "/")
    prefixes = [str(app.get("route_prefix", "/")) for app in ours]
    if not ours:
        raise ConfigError(f"{source}: no application has import_path {IMPORT_PATH}")
    if prefixes[0] != "/" or len({*prefixes}) < len(prefixes):
        raise ConfigError(f"{source}: route_prefix: one application has /, and each other one a prefix of its own")
    if wrong := [prefix for prefix in prefixes[1:] if not PREFIX.fullmatch(prefix)]:
        raise ConfigError(f"{source}: route_prefix: expected /, or {MODELS}NAME for another model, not {wrong[0]!r:.80}")
    for app in ours:
        found = app.setdefault("deployments", [])
        if not isinstance(found, list) or any(not isinstance(one, dict) or one.get("name") != DEPLOYMENT for one in found):
            raise ConfigError(f"{source}: deployments: expected a list of mappings named {DEPLOYMENT}, the one deployment there is")
    return ours


def http_address(config: ServeConfig) -> tuple[str, int]:
    """Host and port for clients. ConfigError."""
    options = config.get("http_options") or {}
    try:
        return str(options.get("host", "127.0.0.1")), int(options.get("port", 8000))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"http_options.port: {error}") from error


def deployments(config: ServeConfig) -> Iterator[tuple[str, ServeConfig]]:
    for number, app in enumerate(config["applications"]):
        for index, options in enumerate(app.get("deployments") or ()):
            yield f"applications.{number}.deployments.{index}", options


def read_settings(config: ServeConfig, source: str) -> Settings:
    return read_models(config, source)["/"]


def read_models(config: ServeConfig, source: str) -> dict[str, Settings]:
    """The settings of each model by route prefix, `/` first. ConfigError."""
    models: dict[str, Settings] = {}
    owners: dict[str, str] = {}
    for app in applications(config, source):
        prefix = str(app.get("route_prefix", "/"))
        at = f"{source}: args of {app.get('name', 'the application')}"
        try:
            settings = Settings.read(app.get("args") or {})
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error
        models[prefix] = settings
        for key in ("limits", "keys", "conversations"):
            if getattr(settings, key) != getattr(models["/"], key):
                raise ConfigError(f"{at}: {key}: expected those of the application at /, as the guard before all has one set")
        for name in settings.served:
            if owners.setdefault(name, prefix) != prefix:
                raise ConfigError(f"{at}: served_model_name: {name} is a name of two applications")
    return models
