"""The typed arguments of an application: what stands under `args:` in the YAML, each key with its bounds.

An unknown key or a bad value is a ConfigError of one line that names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml
from pydantic import Field

from deploy.edge.edge_settings import FrozenSettings, LimitSettings, LogSettings, TracingSettings
from engine.config import AttentionName, LogLevel, PolicyName
from engine.errors import ConfigError

IMPORT_PATH = "deploy.app:build"
DEPLOYMENT = "Quartet"


class DiscoverySettings(FrozenSettings):
    """The cluster's http_sd endpoint, on the head node. A cluster's first replica decides; a taken port gives way to a free one."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=9464, ge=0, le=65535)


class MetricsSettings(FrozenSettings):
    """Where the exporter of each replica listens. Port 0: a free one, written to the log and to `/health/ready`.

    aliases           vLLM's metric names too
    ttft_objective_s  what a first token, and
    tpot_objective_s  what a token after it, may take: quartet_slo_requests_total judges by them
    """

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    aliases: bool = True
    ttft_objective_s: float = Field(default=1.0, gt=0)
    tpot_objective_s: float = Field(default=0.05, gt=0)
    discovery: DiscoverySettings = DiscoverySettings()


class Settings(FrozenSettings):
    """One deployment of one model.

    model              a local folder, a Hugging Face hub id, `nano:<member>` (trained, beside the code: e2b, 26b-a4b, 31b),
                       `random:<member>` (nano with random weights) or `dummy:<member>` (a public shape with random weights)
    revision           of a hub id
    served_model_name  what clients call it; default: the model's own name
    tp                 ranks of a group: GPUs of one node
    device             auto: cuda where NVML shows a GPU to this replica
    attention          reference, triton or trtllm_mha; default: by GPU and FlashInfer, and `quartet doctor` says which and why
    attention_decode, attention_extend  the same for decode rows and for prefill chunks alone
    flashinfer_download  FlashInfer may fetch kernels that it lacks at the first request
    max_queue          choices that may wait beyond max_seqs; more are refused at once (default: 256, or four times max_seqs)
    max_queue_tokens   tokens of the prompts that wait; a prompt may always wait alone (default: 32 prompts of max_len)
    core_log           info: a line a second of work and class of step on stderr; debug: a line a step; warning: none
    policy             who is served when: fair, or arrival (strictly in order)
    prefix_cache       keep the pages of prompts and answers for requests that begin alike
    prefix_cache_share  how much of each pool may lie idle for that
    pages              pages of each KV group, null page included; default: sized by need
    wait_for_nodes     do not refuse when no node can hold a group now: the cluster scales GPU nodes from zero
    build              any string; changing it makes Serve replace the replicas (it compares configuration, not code)
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    tp: int = Field(default=1, ge=1, le=64)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    load_format: Literal["safetensors", "dummy"] | None = None
    attention: AttentionName | None = None
    attention_decode: AttentionName | None = None
    attention_extend: AttentionName | None = None
    flashinfer_download: bool = False
    max_seqs: int = Field(default=16, ge=1, le=4096)
    max_len: int = Field(default=2048, ge=2)
    max_queue: int | None = Field(default=None, ge=0)
    max_queue_tokens: int | None = Field(default=None, ge=1)
    prefill_budget: int = Field(default=512, ge=1)
    core_log: LogLevel = "info"
    policy: PolicyName = "fair"
    prefix_cache: bool = True
    prefix_cache_share: float = Field(default=1.0, gt=0, le=1)
    pages: tuple[int, ...] | None = None
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    step_timeout_s: float = Field(default=60.0, gt=0)
    heartbeat_timeout_s: float = Field(default=3.0, gt=0)
    boot_timeout_s: float = Field(default=600.0, gt=0)
    max_tokens: int | None = Field(default=None, ge=1, description="default of a chat completion; none: what fits")
    metrics: MetricsSettings = MetricsSettings()
    limits: LimitSettings = LimitSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    wait_for_nodes: bool = False
    build: str = ""

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def capacity(self) -> int:
        """Choices that a replica takes on at once, running or waiting."""
        return self.max_seqs + (max(256, 4 * self.max_seqs) if self.max_queue is None else self.max_queue)

    @property
    def queue_tokens(self) -> int:
        """Tokens of prompts that may wait at once."""
        return 32 * self.max_len if self.max_queue_tokens is None else self.max_queue_tokens

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
