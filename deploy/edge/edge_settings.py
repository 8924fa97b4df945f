"""Settings of the edge: what one request may ask for, who may, what is logged of it, and where its spans go."""

import json
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FrozenSettings(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LimitSettings(FrozenSettings):
    """What one request may ask for, and how much of all there may be at once; beyond it the answer is a 4xx before any work."""

    hosts: tuple[str, ...] | None = Field(
        default=None,
        description="names in the Host header that are answered to, without ports; none: loopback's and that of http_options where "
        "the launcher starts Serve, there are no API keys and the address is no wildcard, any elsewhere",
    )
    cors_origins: tuple[str, ...] = Field(default=(), description='of web pages that may use the API; "*": all')
    body_bytes: int = Field(default=8 << 20, ge=1024, description="bytes of a request's body; more get 413")
    header_bytes: int = Field(default=32 << 10, ge=1024, description="bytes of a request's headers; more get 431")
    body_timeout_s: float = Field(default=30.0, gt=0, description="a body that has not come by then gets 408")
    stop_strings: int = Field(default=4, ge=0, le=64, description="stop strings of a request")
    stop_bytes: int = Field(default=256, ge=1, le=4096, description="bytes of a stop string")
    stop_token_ids: int = Field(default=128, ge=0, le=1024, description="stop token ids of a request")
    top_logprobs: int = Field(default=20, ge=0, le=20, description="alternatives per token whose logprobs may be asked for")
    n: int = Field(default=8, ge=1, le=64, description="choices of a request")
    min_priority: int = Field(default=0, description="most urgent `priority` of a request; lower numbers are served first")
    isolate_cache: bool | None = Field(
        default=None,
        description="requests share cached prefixes only with those of the same API key's holder, or without keys of the same "
        "Authorization header; none: where there are API keys",
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of one request, from its head to its last byte")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="a request that has not begun by then is refused with 429")
    requests: int = Field(default=4096, ge=16, description="requests of any kind that a replica may have at once; more get 429")
    uploads: int = Field(default=512, ge=1, description="bodies that may be on their way at once; the oldest gives way with 408")
    upload_bytes: int = Field(default=256 << 20, ge=1 << 20, description="bytes held of bodies that are on their way, or unread")
    write_timeout_s: float = Field(default=30.0, gt=0, description="a client that takes no byte for so long is dropped")


class KeySettings(FrozenSettings):
    """Where the API keys are listed: `quartet key new` makes a line of them. With neither set, no request needs a key."""

    file: str | None = Field(
        default=None, pattern="^/", description="a file of keys' hashes, on every node with replicas; read again when it changes"
    )
    variable: str | None = Field(
        default=None, pattern="^[A-Za-z_][A-Za-z0-9_]*$", description="the environment variable of the replicas that has its lines"
    )

    @property
    def needed(self) -> bool:
        """Whether a request needs a key."""
        return self.file is not None or self.variable is not None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file is not None and self.variable is not None:
            raise ValueError("either file or variable")
        return self


KEYS_VARIABLE = "QUARTET_KEYS"  # in the environment: the KeySettings as JSON of the guard around Serve
LIMITS_VARIABLE = "QUARTET_LIMITS"  # in the environment: the limits as JSON of the guard around Serve
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_GUARDED = ("body_bytes", "header_bytes", "body_timeout_s", "requests", "uploads", "upload_bytes", "write_timeout_s")


def shared_limits(limits: Iterable[LimitSettings], host: str, *, keys: bool = False) -> str:
    """The loosest of several applications' limits, for the guard around them all, at a server that listens on `host`.

    Where no application says by which names it is known, it is by those of loopback and by `host`; by any at a wildcard address,
    and where requests need `keys`, which no page of another site has.
    """
    every = list(limits)
    shared: dict[str, Any] = {name: max(getattr(one, name) for one in every) for name in _GUARDED}
    named = [name for one in every for name in one.hosts or ()]
    if all(one.hosts is not None for one in every):
        shared["hosts"] = sorted(set(named))
    elif not keys and host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        shared["hosts"] = sorted({*LOOPBACK_NAMES, host, *named})
    return json.dumps(shared)


class LogSettings(FrozenSettings):
    """What a replica writes to Ray Serve's own log file of it (logs/serve/replica_*.log of Ray's session).

    Serve's own `logging_config` in the YAML stays in force while format is text and no folder is set.
    """

    format: Literal["text", "json"] = Field(
        default="text",
        description="text: as Serve's default; json: one object a line, Serve's fields and ours, with our access line for Serve's",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="of our loggers and, with format json, of Serve's"
    )
    access: bool = Field(default=True, description="one line a request at its end; false: only of those that failed by our fault")
    folder: str | None = Field(default=None, min_length=1, description="where the files go; none: Ray's session")


class TracingSettings(FrozenSettings):
    """OpenTelemetry spans of each request. Without an endpoint nothing is imported, and nothing costs."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        description="OTLP over HTTP, whole: http://host:4318/v1/traces; keys by OTEL_EXPORTER_OTLP_HEADERS, not from here",
    )
    sample_ratio: float = Field(default=1.0, ge=0, le=1, description="of the requests whose caller has not decided by traceparent")
    service_name: str = Field(default="quartet", min_length=1, max_length=256, description="the spans' service.name")
    queue: int = Field(
        default=8192, ge=1, le=1 << 20, description="spans that may wait for the collector; beyond, the oldest are dropped"
    )
    timeout_s: float = Field(default=10.0, gt=0, description="one attempt to hand over a batch, retries included")
