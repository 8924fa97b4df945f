"""What a router knows of a replica's prefix cache: an index built from its KV events."""

from array import array
from collections import defaultdict
from typing import Any

import msgspec

from engine.core.prefix import extend_keys, root_key
from engine.core.scheduler import Scheduler
from engine.kv_events import CacheEvents


class KvIndex:
    """Hashes held, by group, from messages as vLLM's decoder reads them: arrays whose first element names the event."""

    def __init__(self) -> None:
        self.held: defaultdict[int, set[bytes]] = defaultdict(set)
        self.stored = 0
        self.removed = 0
        self.with_extra = 0  # pages stored whose hashes are of more than tokens

    def follow(self, events: CacheEvents) -> bool:
        """Learns what has happened since the last call; whether anything has."""
        told = events.take()
        if told:
            self.apply(msgspec.msgpack.encode((0.0, told, 0)))
        return bool(told)

    def apply(self, batch: bytes) -> None:
        """Learns one message."""
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        for name, *fields in events:
            {"BlockStored": self._store, "BlockRemoved": self._remove}[name](*fields)

    def _store(self, hashes: list[bytes], parent: bytes | None, tokens: list[int], page: int, *rest: Any) -> None:
        lora_id, medium, lora_name, extra, group, kind, window = rest
        assert (lora_id, lora_name, medium) == (None, None, "GPU")
        assert (kind == "sliding_window") == (window is not None)
        assert len(tokens) == page * len(hashes)
        if extra is None:  # text alone, without a salt: the tokens say what the hashes are
            keys: list[bytes] = []
            extend_keys(keys, root_key("") if parent is None else parent, array("i", tokens), page, len(hashes))
            assert keys == hashes, "tokens and parent are not those of the hashes"
        else:
            assert len(extra) == len(hashes)
            self.with_extra += len(hashes)
        self.stored += len(hashes)
        self.held[group].update(hashes)

    def _remove(self, hashes: list[bytes], medium: str, group: int) -> None:
        assert medium == "GPU"
        assert self.held[group].issuperset(hashes), "a page was removed that was never stored"
        self.removed += len(hashes)
        self.held[group].difference_update(hashes)

    def check(self, scheduler: Scheduler) -> None:
        """It knows what the prefix cache holds, in both groups."""
        cache = scheduler.allocator.cache
        full = {key for segment in cache._order for key in segment.keys}
        windows = {key for segment in cache._tails for key in segment.tail_keys}
        pools = scheduler.allocator.pools
        truth = {pools[-1].group.index: full}
        if len(pools) > 1:
            truth[pools[0].group.index] = windows
        for group, keys in truth.items():
            assert self.held[group] == keys, f"group {group}: {len(self.held[group] ^ keys)} pages differ"
