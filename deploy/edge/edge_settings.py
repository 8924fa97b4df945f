"""Settings of the edge: limits, keys, logs and traces."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deploy.edge.bodies.key_types import INT32_MAX
from engine.config import Duration
from engine.protocol import FrozenStruct

Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\0]*$")]
Host = Annotated[str, Meta(pattern="^([^/:]+|[^/]*:[^/]*:[^/]*)$")]  # without a port
Origin = Annotated[str, Meta(pattern="^([*]|null|[^/A-Z]+://[^/A-Z]+)$")]
SoftTokens = Literal[70, 140, 280, 560, 1120]  # that an image may have


class LimitSettings(FrozenStruct):
    """Beyond a limit the answer is a 4xx."""

    hosts: tuple[Host, ...] | None = None
    """accepted names of the Host header, without ports; none: loopback and the host of http_options if the launcher starts Serve,
    there are no API keys and the address is not a wildcard; otherwise any"""
    cors_origins: tuple[Origin, ...] = ()
    """origins of web pages that may use the API, as https://page.example:8443; "*": all"""
    proxies: tuple[str, ...] = ()
    """addresses or networks of proxies whose X-Forwarded-For names the client, apart from those of loopback; with several nodes the
    nodes' own, where HAProxy runs"""
    body_bytes: Annotated[int, Meta(ge=1024)] = 32 << 20
    """bytes of a request's body; more get 413"""
    header_bytes: Annotated[int, Meta(ge=1024)] = 32 << 10
    """bytes of a request's headers; more get 431, and from HAProxy a 400 above conversations.look_bytes"""
    body_timeout_s: Duration = 30.0
    """a body that is not complete by then gets 408"""
    n: Annotated[int, Meta(ge=1, le=64)] = 8
    """choices of a request"""
    min_priority: Annotated[int, Meta(ge=-INT32_MAX, le=0)] = 0
    """most urgent `priority` of a request; lower numbers are served first"""
    isolate_cache: bool | None = None
    """requests share cached prefixes only within the same API key's holder, or without keys within the same Authorization header;
    none: true if there are API keys"""
    request_timeout_s: Duration = 600.0
    """deadline of one request, from its head to its last byte"""
    queue_timeout_s: Duration = 35.0
    """a request that has not started by then gets 429. Together with the 20 s for the check of a grammar it stays below the 60 s
    after which proxies give up"""
    requests: Annotated[int, Meta(ge=16, le=INT32_MAX)] = 4096
    """requests of any kind that a replica may have at once; more get 429"""
    uploads: Count = 512
    """bodies that may be uploaded at once; a client may have half of them; one more gets 429 before it is sent"""
    upload_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """bytes of bodies that are uploaded or not yet parsed and, counted separately, of media until they are decoded; a client may
    have half; one more waits 18 s for room, unread, and then gets 429; at least body_bytes"""
    write_timeout_s: Duration = 30.0
    """a client that takes no byte for so long is dropped"""
    comment_s: Annotated[float, Meta(ge=0)] = 0.0
    """after so many silent seconds a stream sends its headers and a comment line, for proxies that end silent answers; a refusal
    after that is an error event instead of a 429; 0: never"""

    def __post_init__(self) -> None:
        if self.body_bytes > self.upload_bytes:
            raise ValueError(f"body_bytes {self.body_bytes} exceeds upload_bytes {self.upload_bytes}: it would never be read")
        for network in self.proxies:
            ipaddress.ip_network(network, strict=False)


class MediaSettings(FrozenStruct):
    """Beyond a bound the answer is a 400 before anything is decoded."""

    max_media: Annotated[int, Meta(ge=0, le=1024)] = 32
    """images, videos and clips of a request"""
    max_soft_tokens: SoftTokens = 1120
    """largest number of tokens of an image; a larger request is lowered to it"""
    pixels: Annotated[int, Meta(ge=1 << 16, le=1 << 28)] = 25_000_000
    """pixels of an image, or of a video's frame, before it is resized"""
    audio_seconds: Annotated[float, Meta(gt=0, le=1000)] = 900.0
    """seconds of a clip"""
    video_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 3600.0
    """seconds of a video in a container"""
    waiting_bytes: Annotated[int, Meta(ge=1 << 20)] = 2 << 30
    """bytes of decoded media that may wait for their prefill; one request is always allowed"""
    fetch: tuple[Host, ...] = ()
    """hosts from which media are fetched by http(s), in addition to data: URLs; "*": any host with a public address; a host that
    is named may have a private one"""
    fetch_bytes: Annotated[int, Meta(ge=1024, le=1 << 28)] = 24 << 20
    """bytes of a file that is fetched"""
    fetch_timeout_s: Annotated[float, Meta(gt=0, le=100)] = 10.0
    """time to fetch one, redirects included"""


class KeySettings(FrozenStruct):
    """With neither set, no request needs a key. `quartet key new` makes an entry."""

    file: AbsolutePath | None = None
    """a file in YAML of keys' hashes, on every node with replicas; read again when it changes"""
    variable: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """the environment variable of the replicas that has the file's text"""

    def __post_init__(self) -> None:
        if self.file and self.variable:
            raise ValueError("either file or variable")

    @property
    def needed(self) -> bool:
        return bool(self.file or self.variable)


KEYS_VARIABLE = "QUARTET_KEYS"  # in the environment: the KeySettings as JSON of the guard around Serve
LIMITS_VARIABLE = "QUARTET_LIMITS"  # in the environment: the limits as JSON of the guard around Serve
MODELS = "/models/"  # route prefixes of applications lie below it; the guard around Serve sees paths with them
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - addresses of all interfaces, compared, not bound


def url_host(host: str) -> str:
    if ":" in host:
        return f"[{host}]"
    return host


def guard_limits(limits: LimitSettings, host: str, *, keys: bool = False) -> str:
    """For the guard around Serve at `host`. Without `hosts` it answers to `host` and loopback; at a
    wildcard address, or with `keys`, which no other site's page has, to any name."""
    if limits.hosts is None and not keys and host not in WILDCARDS:
        limits = msgspec.structs.replace(limits, hosts=(*LOOPBACK_NAMES, url_host(host)))
    return msgspec.json.encode(limits).decode()


class LogSettings(FrozenStruct):
    """Serve's `logging_config` stays in force while format is text and no folder is set."""

    format: Literal["text", "json"] = "text"
    """text: as Serve's default; json: one object a line, with Serve's fields and ours, and our access line only"""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """least severe lines that are written: ours and, with format json, Serve's"""
    access: bool = True
    """one line a request at its end; false: only of those that failed by our fault"""
    folder: Annotated[str, Meta(min_length=1)] | None = None
    """where the files go; none: Ray's session"""


class TracingSettings(FrozenStruct):
    """Without an endpoint nothing is imported."""

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = None
    """OTLP over HTTP, whole: http://host:4318/v1/traces; keys by OTEL_EXPORTER_OTLP_HEADERS, not from here; bounds by
    OTEL_EXPORTER_OTLP_TIMEOUT and OTEL_BSP_MAX_QUEUE_SIZE"""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """share of requests that are traced if no traceparent decides"""
    service_name: Name = "quartet"
    """the spans' service.name"""
