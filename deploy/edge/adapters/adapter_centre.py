"""Which adapters all replicas of an application serve besides the config's: one AdapterCentre for all, in an actor of its own.

    replica --change--> AdapterCentre    an adapter was loaded or unloaded at that replica: the list has a new revision
            --sync----> AdapterCentre    each second: what the replica has done; the answer is the list
            --behind--> AdapterCentre    which replicas have not yet done a revision

A centre that starts anew takes the list of the first replica that syncs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SILENT_S = 10.0  # a replica that is silent for so long is gone
MOST_NAMES = 2048  # of a list, unloaded ones included


class AdapterEntry(NamedTuple):
    """`folder`: None: unloaded."""

    revision: int
    folder: str | None


class AdapterList(NamedTuple):
    """`revision`: of the last change."""

    revision: int
    entries: dict[str, AdapterEntry]


EMPTY = AdapterList(0, {})


class Behind(NamedTuple):
    """Of a revision. `waiting`: replicas that have not done it; `error`: why one cannot."""

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
    """`clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._applications: dict[str, _Application] = {}

    def sync_adapters(self, replica: str, application: str, done: AdapterList, errors: dict[int, str]) -> AdapterList:
        """`done`: the list that the replica has brought about, but for the revisions in `errors`."""
        found = self._found(application, done)
        found.replicas[replica] = _Replica(self._clock(), done.revision, errors)
        return found.wanted

    def change_adapter(
        self, replica: str, application: str, done: AdapterList, name: str, folder: str | None  # noqa: ARG002 - every method has it
    ) -> AdapterEntry:
        """The replica has loaded an adapter by this name, or unloaded it."""
        found = self._found(application, done)
        entry = AdapterEntry(found.wanted.revision + 1, folder)
        entries = {known: each for known, each in found.wanted.entries.items() if known != name}
        if len(entries) >= MOST_NAMES:
            del entries[next((known for known, each in entries.items() if each.folder is None), next(iter(entries)))]
        found.wanted = AdapterList(entry.revision, {**entries, name: entry})
        return entry

    def adapters_behind(self, replica: str, application: str, revision: int) -> Behind:
        """Of the replicas other than this one."""
        found = self._found(application, EMPTY)
        now = self._clock()
        found.replicas = {name: each for name, each in found.replicas.items() if now - each.seen < SILENT_S}
        others = [each for name, each in found.replicas.items() if name != replica]
        errors = [each.errors[revision] for each in others if revision in each.errors]
        return Behind(sum(each.done < revision for each in others), errors[0] if errors else None)

    def _found(self, application: str, done: AdapterList) -> _Application:
        found = self._applications.setdefault(application, _Application())
        if done.revision > found.wanted.revision:
            found.wanted = done
        return found
