"""Publishes what the prefix cache holds over ZeroMQ, in vLLM's messages
(`vllm.distributed.kv_events`).

A message is a topic, a sequence number (8 bytes, big endian) and msgpack `[seconds, [event, ...],
0]`. After a gap in the numbers a router forgets this replica's pages. A page's hash is its cache
key.
"""

import time
from array import array
from collections import Counter
from collections.abc import Sequence as Items

import msgspec

from engine.errors import ConfigError
from engine.geometry import KVGroup
from engine.protocol import MediaItem

MOST_WAITING = 100_000  # messages that a slow subscriber may leave unread; later ones are lost to it
Extra = tuple[str, ...] | None


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Consecutive pages now cached. `extra_keys`: what keys contain besides tokens."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Extra] | None
    group_idx: int
    kv_cache_spec_kind: str
    sliding_window: int | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[bytes]
    medium: str
    group_idx: int


class CacheEvents:
    """Prefixes may share sliding pages: one is removed with the last."""

    def __init__(self) -> None:
        self._events: list[BlockStored | BlockRemoved] = []
        self._kept: dict[int, Counter[bytes]] = {}

    def stored(
        self, group: KVGroup, keys: list[bytes], first: int, tokens: "array[int]", media: Items[MediaItem], salted: bool
    ) -> None:
        """Pages [first, len(keys)) of a prefix are held once more. `salted`: its root key has a
        salt."""
        kept = self._kept.setdefault(group.index, Counter())
        new = [index for index in range(first, len(keys)) if not kept[keys[index]]]
        kept.update(keys[first:])
        if not new:
            return
        first, end = new[0], new[-1] + 1  # pages between them that are held already are told again
        extra = [_extra(index, group.page, keys, media, salted) for index in range(first, end)]
        self._events.append(
            BlockStored(
                block_hashes=keys[first:end],
                parent_block_hash=keys[first - 1] if first else None,
                token_ids=tokens[first * group.page : end * group.page].tolist(),
                block_size=group.page,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=extra if any(extra) else None,
                group_idx=group.index,
                kv_cache_spec_kind="sliding_window" if group.window else "full_attention",
                sliding_window=group.window,
            )
        )

    def removed(self, group: KVGroup, keys: list[bytes]) -> None:
        kept = self._kept[group.index]
        gone = []
        for key in keys:
            kept[key] -= 1
            if not kept[key]:
                del kept[key]
                gone.append(key)
        if gone:
            self._events.append(BlockRemoved(gone, "GPU", group.index))

    def take(self) -> list[BlockStored | BlockRemoved]:
        events = self._events
        self._events = []
        return events


def _extra(index: int, page: int, keys: list[bytes], media: Items[MediaItem], salted: bool) -> Extra:
    """Digests of the media in a page. A salted prefix's first page adds its own key, so no other prompt matches."""
    digests = [item.digest.hex() for item in media if item.first < (index + 1) * page and item.end > index * page]
    if salted and index == 0:
        digests.append(keys[0].hex())
    return tuple(digests) or None


class KvPublisher:
    """ConfigError: the socket cannot be bound."""

    def __init__(self, events: CacheEvents, endpoint: str, topic: str) -> None:
        import zmq  # whose library takes 40 ms, and is needed nowhere else

        self._events = events
        self._topic = topic.encode()
        self._sent = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(MOST_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"kv_events.endpoint: {endpoint} cannot be bound: {error}") from error

    def publish(self) -> None:
        if events := self._events.take():
            batch = msgspec.msgpack.encode((time.time(), events, 0))
            self._socket.send_multipart((self._topic, self._sent.to_bytes(8, "big"), batch))
            self._sent += 1

    def close(self) -> None:
        self._socket.close()
