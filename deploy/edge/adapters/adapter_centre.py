"""The adapters that replicas of an application serve besides the config's."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SILENT_S = 10.0  # a replica that is silent for so long is gone
MOST_NAMES = 2048  # of a list, unloaded ones included


class AdapterEntry(NamedTuple):
    revision: int
    folder: str | None  # None: unloaded


class AdapterList(NamedTuple):
    revision: int
    entries: dict[str, AdapterEntry]


EMPTY = AdapterList(0, {})


class LateReplicas(NamedTuple):
    waiting: int
    error: str | None


@dataclass
class _Replica:
    seen: float
    done: int
    errors: dict[int, str] = field(default_factory=dict)  # by revision


@dataclass
class _Application:
    wanted: AdapterList = EMPTY
    replicas: dict[str, _Replica] = field(default_factory=dict)


class AdapterCentre:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._applications: dict[str, _Application] = {}

    def sync_adapters(self, replica: str, application: str, done: AdapterList, errors: dict[int, str]) -> AdapterList:
        """`done`: what the replica has brought about, without the revisions in `errors`."""
        found = self._found(application, done)
        found.replicas[replica] = _Replica(self._clock(), done.revision, errors)
        return found.wanted

    def change_adapter(
        self, replica: str, application: str, done: AdapterList, name: str, folder: str | None  # noqa: ARG002 - every method has it
    ) -> AdapterEntry:
        found = self._found(application, done)
        entry = AdapterEntry(found.wanted.revision + 1, folder)
        entries = {known: each for known, each in found.wanted.entries.items() if known != name}
        if len(entries) >= MOST_NAMES:
            del entries[next((known for known, each in entries.items() if each.folder is None), next(iter(entries)))]
        found.wanted = AdapterList(entry.revision, {**entries, name: entry})
        return entry

    def late_adapters(self, replica: str, application: str, revision: int) -> LateReplicas:
        """Counts replicas other than this one."""
        found = self._found(application, EMPTY)
        now = self._clock()
        found.replicas = {name: each for name, each in found.replicas.items() if now - each.seen < SILENT_S}
        others = [each for name, each in found.replicas.items() if name != replica]
        errors = [each.errors[revision] for each in others if revision in each.errors]
        return LateReplicas(sum(each.done < revision for each in others), errors[0] if errors else None)

    def _found(self, application: str, done: AdapterList) -> _Application:
        found = self._applications.setdefault(application, _Application())
        if done.revision > found.wanted.revision:
            found.wanted = done
        return found
