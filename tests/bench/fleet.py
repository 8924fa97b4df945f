"""Prefix hits of a fleet: `python -m tests.bench.fleet [--replicas 4] [--record MACHINE]`.

Conversations of several turns at one replica, and at a fleet: the share of prompt tokens found cached, and prompt tokens at the
busiest replica over the mean.
"""

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.bench.record import Row, add_record_option, append
from tests.support.stack.serve_process import Stack, free_port

CLIENTS = 4
WORDS = ("red", "green", "house", "seven", "apple", "river", "north", "small", "glass", "tree")
PROMPTS = "quartet_prompt_tokens_total"


class Talks:
    """All conversations against a stack of `replicas`."""

    def __init__(self, folder: Path, replicas: int, given: argparse.Namespace, **more: Any) -> None:
        self.cached = 0
        self.prompt = 0
        discovery = free_port()
        args: dict[str, Any] = {
            "model": "nano:31b",
            "tp": 1,
            "mtp": {},
            "max_seqs": 8,
            "pages": list(given.pages),
            "metrics": {"discovery": {"port": discovery}},
        }
        stack = Stack(folder, args=args | more, deployment={"num_replicas": replicas})
        began = time.monotonic()
        try:
            stack.start(timeout_s=400)
            with ThreadPoolExecutor(CLIENTS) as pool:
                histories = [self._opening(number) for number in range(given.conversations)]
                for _ in range(given.turns):  # in turns of all, so that neighbours of a turn are other conversations
                    list(pool.map(lambda number: self._turn(stack, number, histories[number]), range(given.conversations)))
            self.by_replica = prompts_by_replica(discovery)
        finally:
            stack.end()
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{replicas} {more}: {self.hits:.3f} of {self.prompt} tokens cached, {self.by_replica}, {took}", flush=True)

    @property
    def hits(self) -> float:
        """The share of prompt tokens that were found cached."""
        return self.cached / self.prompt

    @property
    def busiest(self) -> float:
        """Prompt tokens at the busiest replica, over the mean."""
        return max(self.by_replica) * len(self.by_replica) / sum(self.by_replica)

    def _opening(self, number: int) -> list[dict[str, str]]:
        rng = random.Random(number)
        return [{"role": "system", "content": f"Conversation {number}. " + " ".join(rng.choices(WORDS, k=16))}]

    def _turn(self, stack: Stack, number: int, history: list[dict[str, str]]) -> None:
        rng = random.Random(number * 100 + len(history))
        history.append({"role": "user", "content": f"Talk {number}: " + " ".join(rng.choices(WORDS, k=16))})
        reply = stack.chat({"messages": history, "max_tokens": 8, "seed": number}, timeout_s=120).raise_for_status()
        usage = reply.json()["usage"]
        self.prompt += usage["prompt_tokens"]
        self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        history.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or "yes"})


def prompts_by_replica(discovery: int) -> list[float]:
    """Prompt tokens of each replica, by its metrics."""
    targets = httpx.get(f"http://127.0.0.1:{discovery}/targets", timeout=10).raise_for_status().json()
    pages = [httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text.splitlines() for target in targets]
    return [sum(float(line.split()[-1]) for line in page if line.startswith(PROMPTS)) for page in pages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--wander", action="store_true", help="a fleet whose conversations do not stay, too")
    parser.add_argument("--pages", type=int, nargs=2, default=(400, 600), metavar=("SLIDING", "FULL"))
    add_record_option(parser)
    given = parser.parse_args()
    talks: dict[str, Talks] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs: list[tuple[str, int, dict[str, Any]]] = [("one", 1, {}), ("fleet", given.replicas, {})]
        if given.wander:
            runs.append(("wandering", given.replicas, {"conversations": {"stay": False}}))
        for name, replicas, more in runs:
            Path(folder, name).mkdir()
            talks[name] = Talks(Path(folder, name), replicas, given, **more)
    rows: list[Row] = [(f"{name}-{given.replicas}", "share of prompt tokens cached", one.hits, "") for name, one in talks.items()]
    rows.append((f"fleet-{given.replicas}", "hits over those of one replica", talks["fleet"].hits / talks["one"].hits, ""))
    rows.append((f"fleet-{given.replicas}", "prompt tokens of the busiest over the mean", talks["fleet"].busiest, ""))
    append(rows, given.record, "tests.bench.fleet")
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
