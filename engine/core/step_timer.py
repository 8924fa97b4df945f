"""How long steps take as the core sees them, by the wall clock: idle time of the ranks between steps is included.

    plan n |-> ######## n ended |######## n + 1 ended       the later step was in the stream before the earlier ended
           |<- took_ms of n  -->|<--- of n + 1 --->|
"""

from collections import deque


class StepTimer:
    """Told of every plan and every result, in order, at monotonic times in seconds."""

    def __init__(self) -> None:
        self._submitted: deque[float] = deque()
        self._ended = 0.0

    def submitted(self, now: float) -> None:
        """A plan went out."""
        self._submitted.append(now)

    def ended(self, now: float) -> float:
        """The oldest step that is out has ended: milliseconds since the one before it did, or since its plan if that is later."""
        began = max(self._ended, self._submitted.popleft())
        self._ended = now
        return 1e3 * (now - began)
