"""Which adapters the ranks have in host memory, and which device slot each one has. Pure.

    add --> known --want--> placing, once a slot is free --placed--> ready --> another one wants its slot
    remove --> leaving, refused to new requests --> dropped, once no request has it

`orders` is what the core asks the replica for.
"""

from collections.abc import Collection
from collections.abc import Set as AbstractSet

from engine.adapters import NO_ADAPTER
from engine.protocol import AdapterOrders


class AdapterSlots:
    """The first of `loaded` adapters (ids from 0) are in slots. An id is never used twice."""

    def __init__(self, slots: int, loaded: int) -> None:
        self._ready = {adapter: adapter for adapter in range(min(slots, loaded))}  # slot by id, least recently used first
        self._placing: dict[int, int] = {}  # slot by id
        self._free = list(range(slots - 1, loaded - 1, -1))
        self._known = set(range(loaded))
        self._leaving: set[int] = set()
        self._orders = AdapterOrders()

    @property
    def placing(self) -> bool:
        return bool(self._placing)

    def is_served(self, adapter: int) -> bool:
        return adapter == NO_ADAPTER or adapter in self._known

    def add(self, adapter: int) -> None:
        self._known.add(adapter)

    def remove(self, adapter: int) -> None:
        """`orders` drops it once no request has it."""
        if adapter in self._known:
            self._known.discard(adapter)
            self._leaving.add(adapter)

    def is_ready(self, adapter: int) -> bool:
        return adapter == NO_ADAPTER or adapter in self._ready

    def use(self, adapter: int) -> int:
        """Returns a ready adapter's slot."""
        if adapter == NO_ADAPTER:
            return NO_ADAPTER
        slot = self._ready.pop(adapter)
        self._ready[adapter] = slot
        return slot

    def want(self, adapter: int, kept: AbstractSet[int]) -> bool:
        """Order the placing of an adapter; False while every slot is being filled or its adapter is `kept`."""
        if adapter in self._placing:
            return True
        if not self._free:
            victim = next((other for other in self._ready if other not in kept), None)
            if victim is None:
                return False
            self._free.append(self._ready.pop(victim))
        slot = self._free.pop()
        self._placing[adapter] = slot
        self._orders.places.append((adapter, slot))
        return True

    def placed(self, adapter: int) -> None:
        self._ready[adapter] = self._placing.pop(adapter)

    @property
    def has_orders(self) -> bool:
        return bool(self._leaving or self._orders)

    def orders(self, used: Collection[int]) -> AdapterOrders:
        """What the replica must do since the last call. used: adapters of all open requests."""
        for adapter in [adapter for adapter in self._leaving if adapter not in used and adapter not in self._placing]:
            self._leaving.discard(adapter)
            if adapter in self._ready:
                self._free.append(self._ready.pop(adapter))
            self._orders.drops.append(adapter)
        orders = self._orders
        self._orders = AdapterOrders()
        return orders
