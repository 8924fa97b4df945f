"""Adapters through the whole stack, as the default config serves the nano model: four ranks, drafts on, over HTTP by name."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.serve.conftest import PROMPT, Adapted, answer_of, greedy
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve


def test_answers_are_those_of_merged_weights(shared_stack: Stack, adapted: Adapted) -> None:
    """The model and both adapters at once, three times: each answers as transformers does with its adapter merged, no two alike;
    a name that nobody has is a 404, and the list has all three."""
    text = TextProcessor.load(resolve("nano:31b"))
    wanted = {name: greedy(model, text) for name, model in adapted.models.items()}
    assert len(set(wanted.values())) == len(wanted)

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(partial(answer_of, shared_stack), [*wanted] * 3))
    assert found == [*wanted.items()] * 3
    listed = httpx.get(f"{shared_stack.url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card.get("parent") for card in listed} == {"nano-31b": None, "farm": "nano-31b", "sea/fish": "nano-31b"}
    unknown = httpx.post(f"{shared_stack.url}/v1/completions", json={"model": "fish", "prompt": PROMPT}, timeout=60)
    assert unknown.status_code == 404
