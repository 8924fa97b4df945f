"""A streamed chat with an ingress of a machine, read on a thread: how it ended, and how long it was silent."""

import itertools
import threading
import time
from collections import Counter
from typing import Any

import httpx

from tests.support.stack.machines import enter_network
from tests.support.stack.serve_process import wait

MODEL = "nano-31b"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
PATIENCE_S = 90.0  # a silence that no stream survives
_numbers = itertools.count()


class Stream:
    """`how`: finish, error, cut or refused; None while it goes on. Times are of the monotonic clock."""

    def __init__(self, network: str, url: str, tokens: int, session: str | None = None) -> None:
        self.how: str | None = None
        self.events = 0
        self.ended = 0.0
        self.longest_gap = 0.0
        self._last = time.monotonic()
        self._network = network
        self._url = url
        self._body = BODY | {"stream": True, "max_tokens": tokens}
        self._session = session or f"conversation {next(_numbers)}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        enter_network(self._network)
        try:
            self.how = self._ask()
        except httpx.TransportError as error:
            self.how = f"cut: {type(error).__name__}"
        self._note_gap()
        self.ended = self._last

    def _ask(self) -> str:
        headers = {"x-session-id": self._session}
        url = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", url, json=self._body, headers=headers, timeout=PATIENCE_S) as reply:
            return self._read(reply)

    def _read(self, reply: httpx.Response) -> str:
        if reply.status_code != 200:
            reply.read()
            return f"refused: {reply.status_code} {reply.headers.get('retry-after')}"
        how = "cut: no end"
        for line in reply.iter_lines():
            self._note_gap()
            self.events += line.startswith("data:")
            if '"error"' in line:
                how = "error"
            if '"finish_reason":"length"' in line:
                how = "finish"
        return how

    def _note_gap(self) -> None:
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self._last)
        self._last = now


def how(streams: list[Stream]) -> Counter[str]:
    """How they ended; all have."""
    for stream in streams:
        stream.thread.join(2 * PATIENCE_S)
    return Counter(str(stream.how) for stream in streams)


def longest_gap(streams: list[Stream]) -> float:
    """The longest silence of any of them, in seconds."""
    return max(stream.longest_gap for stream in streams)


def wait_begun(streams: list[Stream]) -> None:
    """Waits until each has a few events and none is over."""
    wait(lambda: all(stream.events > 2 for stream in streams), 60, lambda: str([stream.how for stream in streams]))
    assert not any(stream.how for stream in streams), [stream.how for stream in streams]
