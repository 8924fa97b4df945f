"""Which requests the core has not begun with yet, told from its figures alone.

The core admits from the head of its queue only and preempts the youngest first, so that what waits there is always the youngest of
what it holds: `waiting` of them. Requests reach it in the order in which they were sent, so `received` says which it has read.

    sent:   a b c d e f g h        received 6: g, h are still on their way
            . . . q q q            not begun, as far as was known; waiting 2: d has been begun since
"""

from collections.abc import Collection


class Queue:
    """Requests in the order in which they were sent, until the core is seen to have begun with them, or they end."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, request: int, place: int) -> None:
        """`request` was sent as the `place`-th; places ascend."""
        self._places[request] = place

    def drop(self, request: int) -> None:
        """It has ended; nothing if it is not here."""
        self._places.pop(request, None)

    def leave(self, received: int, waiting: int, unbegun: Collection[int]) -> list[int]:
        """Take out and return those that are begun, when the core has read `received` and `waiting` of them wait.

        `unbegun`: those whose end without a token comes with these figures; they are out of the core's count already.
        """
        known = [request for request, place in self._places.items() if place <= received and request not in unbegun]
        begun = known[: max(0, len(known) - waiting)]
        for request in begun:
            del self._places[request]
        return begun
