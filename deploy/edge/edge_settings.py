"""Settings of the edge: what one request may ask for, what is logged of it, and where its spans go."""

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class FrozenSettings(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LimitSettings(FrozenSettings):
    """What one request may ask for, and how much of all there may be at once; beyond it the answer is a 4xx before any work.

    hosts         names in the Host header that are answered to, without ports; none: loopback's and that of http_options, where the
                  launcher starts Serve and the address is no wildcard; any elsewhere
    cors_origins  of web pages that may use the API; "*": all
    """

    hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    body_bytes: int = Field(default=8 << 20, ge=1024)
    header_bytes: int = Field(default=32 << 10, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    stop_strings: int = Field(default=4, ge=0, le=64)
    stop_bytes: int = Field(default=256, ge=1, le=4096)
    stop_token_ids: int = Field(default=128, ge=0, le=1024)
    top_logprobs: int = Field(default=20, ge=0, le=20)
    n: int = Field(default=8, ge=1, le=64)
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of one request, from its head to its last byte")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="a request that has not begun by then is refused with 429")
    requests: int = Field(default=4096, ge=16, description="requests of any kind that a replica may have at once; more get 429")
    uploads: int = Field(default=512, ge=1, description="bodies that may be on their way at once; the oldest gives way with 408")
    upload_bytes: int = Field(default=256 << 20, ge=1 << 20, description="what has come of bodies that are on their way")
    write_timeout_s: float = Field(default=30.0, gt=0, description="a client that takes no byte for so long is dropped")


LIMITS_VARIABLE = "QUARTET_LIMITS"  # in the environment: the limits as JSON of the guard around Serve
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_GUARDED = ("body_bytes", "header_bytes", "body_timeout_s", "requests", "uploads", "upload_bytes")


def shared_limits(limits: Iterable[LimitSettings], host: str) -> str:
    """The loosest of several applications' limits, for the guard around them all, at a server that listens on `host`.

    Where no application says by which names it is known, it is by those of loopback and by `host`; by any at a wildcard address.
    """
    every = list(limits)
    shared: dict[str, Any] = {name: max(getattr(one, name) for one in every) for name in _GUARDED}
    named = [name for one in every for name in one.hosts or ()]
    if all(one.hosts is not None for one in every):
        shared["hosts"] = sorted(set(named))
    elif host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        shared["hosts"] = sorted({*LOOPBACK_NAMES, host, *named})
    return json.dumps(shared)


class LogSettings(FrozenSettings):
    """What a replica writes to Ray Serve's own log file of it (logs/serve/replica_*.log of Ray's session).

    format  text, as Serve's default; json: one object a line, Serve's fields and ours, and Serve's access line gives way to ours
    level   of our loggers and, with format json, of Serve's
    access  one line a request at its end; false: only of those that failed by our fault
    folder  where the files go instead
    Serve's own `logging_config` in the YAML stays in force while format is text and no folder is set.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    access: bool = True
    folder: str | None = Field(default=None, min_length=1)


class TracingSettings(FrozenSettings):
    """OpenTelemetry spans of each request. Without an endpoint nothing is imported, and nothing costs.

    endpoint      OTLP over HTTP, whole: http://host:4318/v1/traces. Headers (keys) by OTEL_EXPORTER_OTLP_HEADERS, not from here
    sample_ratio  of the requests whose caller has not decided by `traceparent`
    queue         requests that may wait for the collector; beyond them spans are dropped, and counted
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+(/\S*)?$")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    service_name: str = Field(default="quartet", min_length=1, max_length=256)
    queue: int = Field(default=2048, ge=1, le=1 << 20)
    timeout_s: float = Field(default=10.0, gt=0, description="one attempt to hand over a batch, retries included")
