"""How the requests of an engine's client ended, counted from its events: a sink for EngineClient."""

from dataclasses import dataclass

from engine.events import Event, RequestFinished, RequestStarted

_COUNTED = {"stop": "finished", "length": "finished", "refused": "refused", "error": "failed", "dead": "failed"}


@dataclass
class Outcomes:
    """Requests since start, by their end as the core reported it; `failed` includes those that ended with the group."""

    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0

    def __call__(self, event: Event) -> None:
        match event:
            case RequestStarted():
                self.received += 1
            case RequestFinished(outcome=outcome):
                name = _COUNTED.get(outcome, "aborted")
                setattr(self, name, getattr(self, name) + 1)

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self.received - self.finished - self.refused - self.aborted - self.failed


def no_sink(event: Event) -> None:
    """Drops the event."""
