"""HAProxy's routing settings."""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.config import Duration
from engine.protocol import FrozenStruct

ROUTING_VARIABLE = "QUARTET_ROUTING"  # in the environment: the Routing as JSON of deploy/haproxy_routing.py


class ConversationSettings(FrozenStruct):
    """Which of several replicas has a conversation. HAProxy reads it when Ray starts."""

    stay: bool = True
    """with the replica that had the conversation's first request and has its KV cache; false: with that of fewest requests"""
    idle_s: Duration = 1800.0
    """a conversation is forgotten that had no request for so long"""
    most: Annotated[int, Meta(ge=1000, le=10_000_000)] = 100_000
    """conversations that are remembered, in some 250 bytes each; beyond it the oldest are forgotten"""
    lead: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """a conversation moves when its replica has so many more open requests than the mean; none: half of max_seqs"""
    look_bytes: Annotated[int, Meta(ge=15_360, le=8 << 20)] = 64 << 10
    """bytes of a body in which HAProxy looks for the key of its conversation and for `model`; each connection may hold so many"""
    peer_port: Annotated[int, Meta(ge=1, le=65_535)] = 8405
    """where HAProxies of several nodes share their conversations"""


class ServedName(FrozenStruct):
    """`prefix`: its application's route; `max_len`: the context."""

    name: str
    prefix: str
    max_len: int


class Routing(FrozenStruct):
    """As deploy/haproxy_routing.py reads it. `names`: of all models."""

    stay: bool
    idle_ms: int
    conversations: int
    lead: int
    look_bytes: int
    peer_port: int
    body_timeout_ms: int
    names: tuple[ServedName, ...]


def routing_of(settings: ConversationSettings, slots: int, body_timeout_s: float, names: Iterable[ServedName]) -> str:
    """Routing as JSON. `slots`: sequences that a replica runs at once."""
    routing = Routing(
        stay=settings.stay,
        idle_ms=int(settings.idle_s * 1000),
        conversations=settings.most,
        lead=settings.lead or max(1, slots // 2),
        look_bytes=settings.look_bytes,
        peer_port=settings.peer_port,
        body_timeout_ms=int(body_timeout_s * 1000),
        names=tuple(names),
    )
    return msgspec.json.encode(routing).decode()


def served_names(environ: Mapping[str, str]) -> tuple[ServedName, ...]:
    told = environ.get(ROUTING_VARIABLE)
    if told:
        return msgspec.json.decode(told, type=Routing).names
    return ()
