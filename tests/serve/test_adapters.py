"""Adapters through the whole stack, as the default config serves the nano model: four ranks, drafts on, over HTTP by name."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import transformers

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.serve.conftest import Adapted
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve

PROMPT = "How many sheep are there"
TOKENS = 12


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, text: TextProcessor) -> str:
    ids = torch.tensor(text.encode(PROMPT, add_bos=True))
    first = len(ids)
    for _ in range(TOKENS):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return text.decode(ids[first:].tolist(), skip_special_tokens=True)


def test_answers_are_those_of_merged_weights(shared_stack: Stack, adapted: Adapted) -> None:
    """The model and both adapters at once, three times: each answers as transformers does with its adapter merged, no two alike;
    a name that nobody has is a 404, and the list has all three."""
    text = TextProcessor.load(resolve("nano:31b"))
    wanted = {name: greedy(model, text) for name, model in adapted.models.items()}
    assert len(set(wanted.values())) == len(wanted)

    def ask(name: str) -> tuple[str, str]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{shared_stack.url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()["model"], answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(ask, [*wanted] * 3))
    assert found == [*wanted.items()] * 3
    listed = httpx.get(f"{shared_stack.url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card.get("parent") for card in listed} == {"nano-31b": None, "farm": "nano-31b", "sea/fish": "nano-31b"}
    unknown = httpx.post(f"{shared_stack.url}/v1/completions", json={"model": "fish", "prompt": PROMPT}, timeout=60)
    assert unknown.status_code == 404
