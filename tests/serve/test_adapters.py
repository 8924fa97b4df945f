"""Adapters through the whole stack, as the default config serves the nano model: four ranks, drafts on, over HTTP by name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.support.engine.adapters import Recipe, merge, write
from tests.support.judge.oracle import load_oracle
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve

PROMPT = "How many sheep are there"
TOKENS = 12
Models = dict[str, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Models, dict[str, str]]:
    """Transformers' model by the name of each, and the adapters' folders."""
    folder = resolve("nano:31b")
    made = tmp_path_factory.mktemp("adapters")
    base = load_oracle(folder)
    recipes = {"farm": Recipe(1, alpha=8.0), "sea/fish": Recipe(2, rank=16, alpha=16.0, targets="(q|k|v|o)_proj")}
    adapters = {name: str(write(made / str(recipe.seed), base, recipe)) for name, recipe in recipes.items()}
    merged = {name: merge(load_oracle(folder), Path(path)) for name, path in adapters.items()}
    return {"nano-31b": base, **merged}, adapters


@pytest.fixture(scope="module")
def stack(models: tuple[Models, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), args={"adapters": models[1]})
    try:
        stack.start(timeout_s=300)
        yield stack
        stack.end()
    finally:
        stack.clean_up()


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, text: TextProcessor) -> str:
    ids = torch.tensor(text.encode(PROMPT, add_bos=True))
    first = len(ids)
    for _ in range(TOKENS):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return text.decode(ids[first:].tolist(), skip_special_tokens=True)


def test_answers_are_those_of_merged_weights(stack: Stack, models: tuple[Models, dict[str, str]]) -> None:
    """The model and both adapters at once, three times: each answers as transformers does with its adapter merged, no two alike;
    a name that nobody has is a 404, and the list has all three."""
    text = TextProcessor.load(resolve("nano:31b"))
    wanted = {name: greedy(model, text) for name, model in models[0].items()}
    assert len(set(wanted.values())) == len(wanted)

    def ask(name: str) -> tuple[str, str]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()["model"], answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(ask, [*wanted] * 3))
    assert found == [*wanted.items()] * 3
    listed = httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card.get("parent") for card in listed} == {"nano-31b": None, "farm": "nano-31b", "sea/fish": "nano-31b"}
    unknown = httpx.post(f"{stack.url}/v1/completions", json={"model": "fish", "prompt": PROMPT}, timeout=60)
    assert unknown.status_code == 404
