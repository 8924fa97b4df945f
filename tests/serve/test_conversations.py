"""A fleet of four replicas on a real stack: conversations find their prompts in the prefix cache, and load is spread."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack.serve_process import Stack

pytestmark = [pytest.mark.serve, pytest.mark.slow]

CONVERSATIONS = 40
TURNS = 6
CLIENTS = 4
WORDS = ("red", "green", "house", "seven", "apple", "river", "north", "small", "glass", "tree")
ENGINE: dict[str, Any] = {
    "model": "nano:31b",
    "served_model_name": "nano-31b",
    "tp": 1,
    "mtp": {},
    "max_seqs": 8,
    "pages": [400, 600],
    "metrics": {"discovery": {"enabled": False}},
}


class Talks:
    """All conversations against a stack of `replicas`: the share of prompt tokens that were cached, prompts computed by replica."""

    def __init__(self, folder: Path, replicas: int, **more: Any) -> None:
        self.cached = 0
        self.prompt = 0
        self.homes = Counter[str]()
        stack = Stack(folder, args=ENGINE | more, deployment={"num_replicas": replicas, "max_ongoing_requests": 64})
        try:
            stack.start(timeout_s=240)
            with ThreadPoolExecutor(CLIENTS) as pool:
                histories = [self._opening(number) for number in range(CONVERSATIONS)]
                for _ in range(TURNS):  # in turns of all, so that neighbours of a turn are other conversations
                    list(pool.map(lambda number: self._turn(stack, number, histories[number]), range(CONVERSATIONS)))
        finally:
            stack.clean_up()

    @property
    def hits(self) -> float:
        return self.cached / self.prompt

    def _opening(self, number: int) -> list[dict[str, str]]:
        rng = random.Random(number)
        return [{"role": "system", "content": f"Conversation {number}. " + " ".join(rng.choices(WORDS, k=16))}]

    def _turn(self, stack: Stack, number: int, history: list[dict[str, str]]) -> None:
        rng = random.Random(number * 100 + len(history))
        history.append({"role": "user", "content": f"Talk {number}: " + " ".join(rng.choices(WORDS, k=16))})
        reply = stack.chat({"model": "nano-31b", "messages": history, "max_tokens": 8, "seed": number}, timeout_s=120)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        self.prompt += usage["prompt_tokens"]
        self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        history.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or "yes"})


def test_a_fleet_hits_as_one_replica_does(tmp_path: Path) -> None:
    """By the first turn alone, four replicas find at least 0.95 of the cached tokens of one. Planted: conversations that wander."""
    folders = [tmp_path / name for name in ("one", "four", "wander")]
    for folder in folders:
        folder.mkdir()
    one = Talks(folders[0], 1).hits
    four = Talks(folders[1], 4).hits
    wander = Talks(folders[2], 4, conversations={"stay": False}).hits
    print(f"cached share of prompt tokens: one {one:.3f}, four {four:.3f}, four that wander {wander:.3f}")
    assert four >= 0.95 * one
    assert wander < 0.8 * one
