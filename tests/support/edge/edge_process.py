"""An edge in a process of its own that says what a request cost: `python -m tests.support.edge.edge_process FOLDER MAX_LEN FAULT`.

CPU and memory are the process', so nothing of the client's is in them. How long the event loop was kept from its other work is told
in CPU seconds of that process between two turns of the loop: a machine that is busy with other things adds nothing to it, and a
thread that keeps the interpreter's lock adds all that it takes.
"""

import asyncio
import base64
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from starlette.requests import Request

from deploy.edge import routes
from deploy.edge.answers.response_format import Usage
from deploy.edge.bodies.body_reader import BodyReader
from deploy.edge.media import media_preparer
from deploy.edge.openai import forms
from deploy.edge.serving import http_answer
from engine.front import generation
from engine.front.generation import Delta
from tests.support.edge.http_edge import Edge
from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import process_mb

_TICK_S = 0.002


@dataclass(frozen=True)
class Cost:
    """Since the mark: CPU seconds, the peak of memory above what it was then, the longest that the loop was kept."""

    cpu_s: float
    memory_mb: float
    loop_held_s: float

    @property
    def held_share(self) -> float:
        """For what part of the CPU time the loop was kept at once: on a machine half as fast it is the same."""
        return self.loop_held_s / self.cpu_s


class EdgeProcess:
    """Runs the module below as a child, with one of FAULTS planted in it. `url` is the API's base."""

    def __init__(self, folder: Path, max_len: int, fault: str = "none") -> None:
        command = [sys.executable, "-m", "tests.support.edge.edge_process", str(folder), str(max_len), fault]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self._line()['port']}"

    def mark(self) -> None:
        """From now on costs are counted."""
        self._ask("mark")

    def cost(self) -> Cost:
        """Since the mark."""
        return Cost(**self._ask("cost"))

    def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[httpx.Response, Cost]:
        """The reply to a body, and what it cost."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        self.mark()
        reply = httpx.post(f"{self.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)
        return reply, self.cost()

    def hurry(self) -> None:
        """From now on the core gives tokens as fast as it can."""
        self._ask("hurry")

    def _ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()


class _Meter:
    """What the child tells of itself."""

    def __init__(self) -> None:
        self._longest = 0.0

    async def watch(self) -> None:
        """Turn with the loop."""
        last = time.process_time()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.process_time()
            self._longest = max(self._longest, now - last)
            last = now

    def mark(self) -> dict[str, float]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._cpu, self._memory, self._longest = time.process_time(), process_mb("self", "VmRSS"), 0.0
        return {}

    def cost(self) -> dict[str, float]:
        peak = process_mb("self", "VmHWM") - self._memory
        return {"cpu_s": time.process_time() - self._cpu, "memory_mb": peak, "loop_held_s": self._longest}


def _costly_parse(edge: Edge) -> None:
    """Reading a body takes 300 MB and a loop that no other thread gets into."""
    real = BodyReader.read

    def read(reader: BodyReader[Any], body: bytes) -> Any:
        kept = bytearray(300 << 20)
        assert sum(range(60_000_000)) + kept.count(b"x") > 0
        return real(reader, body)

    BodyReader.read = read  # type: ignore[method-assign, assignment]


def _encode_alone(edge: Edge) -> None:
    """The tokenizer's call for one text, which keeps the interpreter's lock."""
    inner = edge.text._tokenizer

    class Alone:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            return [inner.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    edge.text._tokenizer = Alone()  # type: ignore[assignment]


def _logprobs_at_the_end(edge: Edge) -> None:
    """A whole answer's logprobs become JSON when the answer is complete, not as they come."""
    add, full = forms.ChatFormat.add, forms.ChatFormat.full
    waiting = []

    def keep(form: forms.ChatFormat, index: int, delta: Delta) -> None:
        waiting.append((index, delta))

    def made(form: forms.ChatFormat, usage: Usage) -> bytes:
        for index, delta in waiting:
            add(form, index, delta)
        return full(form, usage)

    forms.ChatFormat.add, forms.ChatFormat.full = keep, made  # type: ignore[method-assign]


def _streams_in_one_go(edge: Edge) -> None:
    """Whatever has come for a stream is made events before anybody else has a turn."""
    http_answer._PIECE_BYTES = generation._MOST_LOGPROBS = 1 << 40


def _bodies_kept(edge: Edge) -> None:
    """A body stays for as long as the edge does."""
    real, kept = routes._body_of, []

    async def keep(request: Request) -> bytes:
        kept.append(await real(request))
        return kept[-1]

    routes._body_of = keep  # type: ignore[assignment]


def _decode_here(edge: Edge) -> None:
    """Images are decoded in this process."""
    from deploy.edge.media.rasters import prepare_image

    media_preparer.prepare = lambda pool, task, source: prepare_image(task, base64.b64decode(source))


FAULTS: dict[str, Callable[[Edge], None]] = {
    "none": lambda edge: None,
    "parse": _costly_parse,
    "encode": _encode_alone,
    "logprobs": _logprobs_at_the_end,
    "streams": _streams_in_one_go,
    "bodies": _bodies_kept,
    "decode": _decode_here,
}


def main() -> None:
    """Serve until stdin ends."""
    folder, max_len, fault = sys.argv[1:4]
    with Edge(Path(folder), max_len=int(max_len), media=frozenset({"image", "video", "audio"})) as edge:
        FAULTS[fault](edge)
        edge.core.forever, edge.core.delay_s = True, 0.01
        edge.core.reads_media = False  # here it costs nothing
        gc.collect()
        gc.freeze()  # as a replica does
        meter = _Meter()
        watch = edge.start(meter.watch())

        def cost() -> dict[str, float]:
            edge.run(asyncio.sleep(2 * _TICK_S))  # until the watch has seen the last turn too
            return meter.cost()

        answers = {"mark": meter.mark, "cost": cost, "hurry": lambda: edge.core.__dict__.update(delay_s=0.0) or {}}
        print(json.dumps({"port": edge.port}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answers[line.strip()]()), flush=True)
        watch.cancel()


if __name__ == "__main__":
    main()
