"""KV events: a router's index is the prefix cache's truth, at every step; beside it, faults that must show."""

import socket
from array import array
from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest
import zmq

from engine.core.prefix import PrefixCache
from engine.errors import ConfigError
from engine.geometry import KVGroup
from engine.kv_events import CacheEvents, KvPublisher
from tests.support.engine.scheduling import two_groups
from tests.support.engine.world_runs import run_worlds, simulate
from tests.support.engine.worlds import World

pytestmark = pytest.mark.pure

WORLDS = 400
Patch = pytest.MonkeyPatch


def test_index_is_the_caches_truth() -> None:
    """The check is the worlds' own, at each of their steps; here that enough happens in them."""
    stored = removed = media = 0
    for seed in range(WORLDS):
        index = simulate(World(seed)).index
        stored += index.stored
        removed += index.removed
        media += index.with_extra
    assert min(stored, removed, media) > 100, (stored, removed, media)


def unheard_eviction(patch: Patch) -> None:
    honest = CacheEvents.removed
    patch.setattr(CacheEvents, "removed", lambda self, group, keys: honest(self, group, keys) if group.window else None)


def shared_window_goes_with_its_first_holder(patch: Patch) -> None:
    honest = CacheEvents.stored

    def once(self: CacheEvents, group: KVGroup, keys: list[bytes], *rest: object) -> None:
        honest(self, group, keys, *rest)
        for key, count in list(self._kept[group.index].items()):
            self._kept[group.index][key] = min(count, 1)

    patch.setattr(CacheEvents, "stored", once)


def known_pages_miscounted(patch: Patch) -> None:
    honest = PrefixCache.insert

    def one_more(self: PrefixCache, keys: list[bytes], *rest: object, **more: bool) -> tuple[int, bool]:
        known, new_tail = honest(self, keys, *rest, **more)
        return min(known + 1, len(keys)), new_tail

    patch.setattr(PrefixCache, "insert", one_more)


@pytest.mark.parametrize("plant", [unheard_eviction, shared_window_goes_with_its_first_holder, known_pages_miscounted])
def test_planted_fault_shows(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_worlds(range(WORLDS))


def _page(token: int) -> "array[int]":
    return array("i", [token] * 4)


def test_subscriber_reads_what_was_published() -> None:
    events = CacheEvents()
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    publisher = KvPublisher(events, endpoint, "kv@here:8000@nano")
    with closing(publisher), zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger, reader.rcvtimeo = 0, 10_000
        reader.connect(endpoint)
        reader.subscribe("kv@")
        group = two_groups(9, 4)[1]
        frames = None
        for turn in range(1000):  # the first ones are lost while the subscription is on its way
            events.stored(group, [bytes([turn % 256, turn // 256])], 0, _page(turn), (), salted=False)
            publisher.publish()
            if reader.poll(10):
                frames = reader.recv_multipart()
                break
        assert frames is not None
        topic, number, batch = frames
        seconds, ((name, hashes, *_),), rank = msgspec.msgpack.decode(batch)
        assert (topic, name, rank) == (b"kv@here:8000@nano", "BlockStored", 0)
        assert len(number) == 8
        assert hashes == [int.from_bytes(number, "big").to_bytes(2, "little")]
        assert seconds > 1.7e9


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"kv_events.endpoint: {endpoint} cannot be bound: Address already in use"):
            KvPublisher(CacheEvents(), endpoint, "")
