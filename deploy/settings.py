"""The typed arguments of an application: what stands under `args:` in the YAML, each key with its bounds.

An unknown key or a bad value is a ConfigError of one line that names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
import yaml
from pydantic import BeforeValidator, Field

from deploy.edge.edge_settings import FrozenSettings, KeySettings, LimitSettings, LogSettings, TracingSettings
from engine.config import EngineSettings, LoadFormat, Thinking, ToolGrammar, declared
from engine.errors import ConfigError

IMPORT_PATH = "deploy.app:build"
DEPLOYMENT = "Quartet"


class DiscoverySettings(FrozenSettings):
    """The cluster's http_sd endpoint, on the head node. A cluster's first replica decides."""

    enabled: bool = Field(default=True, description="list the replicas' exporters for Prometheus")
    host: str = Field(default="127.0.0.1", description="address of the list")
    port: int = Field(default=9464, ge=0, le=65535, description="of the list; a taken port gives way to a free one")


class MetricsSettings(FrozenSettings):
    """Where the exporter of each replica listens, and by what it judges."""

    host: str = Field(default="127.0.0.1", description="address of each replica's exporter")
    port: int = Field(default=0, ge=0, le=65535, description="0: a free one, written to the log and to /health/ready")
    aliases: bool = Field(default=True, description="vLLM's metric names too")
    ttft_objective_s: float = Field(default=1.0, gt=0, description="a first token in time, for quartet_slo_requests_total")
    tpot_objective_s: float = Field(default=0.05, gt=0, description="a later token in time, for quartet_slo_requests_total")
    discovery: DiscoverySettings = DiscoverySettings()


Model = TypeVar("Model", bound=FrozenSettings)


def with_engine_settings(model: type[Model]) -> type[Model]:
    """`model` with a field for each setting of the engine, as engine/config.py declares it."""
    fields: dict[str, Any] = {
        each.name: (each.type, Field(default=each.default, description=each.help, **each.bounds)) for each in declared()
    }
    return pydantic.create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)


def _word(value: Any) -> Any:
    """YAML reads on and off as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


@with_engine_settings
class Settings(FrozenSettings):
    """One deployment of one model: these keys, and those of engine.config.EngineSettings."""

    model: str = Field(
        min_length=1,
        description="a local folder, a Hugging Face hub id, nano:<member> (trained, beside the code: e2b, 26b-a4b, 31b), "
        "random:<member> (nano with random weights) or dummy:<member> (a public shape with random weights)",
    )
    revision: str | None = Field(default=None, description="of a hub id")
    served_model_name: str | None = Field(
        default=None, min_length=1, max_length=256, description="what clients call it; none: the model's own name"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where NVML shows a GPU to this replica")
    load_format: LoadFormat | None = Field(default=None, description="dummy: random weights; none: as `model` says")
    max_queue: int | None = Field(
        default=None, ge=0, description="choices that may wait beyond max_seqs; none: 256, or four times max_seqs"
    )
    max_queue_tokens: int | None = Field(
        default=None, ge=1, description="prompt tokens that may wait; one prompt always may; none: 32 prompts of max_len"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="default of a chat completion; none: what fits")
    tool_grammar: ToolGrammar = Field(
        default="strict",
        description="what is kept of tool calls that the model begins by itself; strict: names and schemas (of schemas that cannot "
        "be kept, names); names; or off: nothing. A tool_choice, and a tool's own strict: true, are always kept",
    )
    chat_template: str | None = Field(
        default=None, pattern="^/", description="a chat template, on every node with replicas; none: the checkpoint's"
    )
    thinking: Annotated[Thinking, BeforeValidator(_word)] = Field(
        default="auto", description="whether the model thinks where a request does not say; auto: as the chat template has it"
    )
    metrics: MetricsSettings = MetricsSettings()
    limits: LimitSettings = LimitSettings()
    keys: KeySettings = KeySettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    wait_for_nodes: bool = Field(
        default=False, description="do not refuse when no node can hold a group now: the cluster starts GPU nodes on demand"
    )
    build: str = Field(default="", description="any string; a change makes Serve replace the replicas (it compares no code)")

    @property
    def engine(self) -> EngineSettings:
        """The engine's part."""
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.__struct_fields__})

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def capacity(self) -> int:
        """Choices that a replica takes on at once, running or waiting."""
        running = self.engine.max_seqs
        return running + (max(256, 4 * running) if self.max_queue is None else self.max_queue)

    @property
    def queue_tokens(self) -> int:
        """Tokens of prompts that may wait at once."""
        return 32 * self.engine.max_len if self.max_queue_tokens is None else self.max_queue_tokens

    @property
    def needs_gpus(self) -> bool:
        """Whether Ray must find GPUs: `auto` means them unless the model is a nano one."""
        return self.device == "cuda" or (self.device == "auto" and not self.model.startswith(("nano:", "random:")))

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Self:
        """Settings from the YAML's `args`; ConfigError names every key that is wrong."""
        try:
            return cls.model_validate(dict(args))
        except pydantic.ValidationError as error:
            raise ConfigError("; ".join(map(_complaint, error.errors(include_url=False)))) from error


def _complaint(detail: Any) -> str:
    """One of pydantic's findings as `key: what is wrong`."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown setting"
    if detail["type"] == "missing":
        return f"{key}: is required"
    shown = repr(detail["input"])
    return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, not {shown[:80]}"


def read_config(path: Path) -> dict[str, Any]:
    """The Serve config in `path`: the mapping that `serve run` takes. ConfigError when it is none."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict) or not isinstance(value.get("applications"), list):
        raise ConfigError(f"{path}: a Serve config has a list of applications")
    return value


def read_settings(config: Mapping[str, Any], source: str) -> list[Settings]:
    """The settings of each of our applications in a Serve config; ConfigError names the file and the key."""
    ours = [app for app in config["applications"] if isinstance(app, dict) and app.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"{source}: no application has import_path {IMPORT_PATH}")
    found = []
    for app in ours:
        if app.get("route_prefix", "/") != "/":
            raise ConfigError(f"{source}: route_prefix: only /, because the paths of the API are OpenAI's")
        try:
            found.append(Settings.read(app.get("args") or {}))
        except ConfigError as error:
            raise ConfigError(f"{source}: args of {app.get('name', 'the application')}: {error}") from error
    return found
