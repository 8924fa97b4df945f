"""Adapters that are loaded through the whole stack while it serves: four ranks, drafts on, over HTTP by name."""

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
    late = {"late": str(write(made / "late", base, Recipe(3, rank=4, alpha=8.0)))}
    merged = {name: merge(load_oracle(folder), Path(path)) for name, path in (adapters | late).items()}
    return {"nano-31b": base, **merged}, adapters


@pytest.fixture(scope="module")
def stack(models: tuple[Models, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    adapters = models[1]
    folder = str(Path(adapters["farm"]).parent)
    slots = {"max_adapters": 2, "max_host_adapters": 3, "adapter_folder": folder}
    stack = Stack(tmp_path_factory.mktemp("stack"), args={"adapters": adapters, **slots})
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


def ask(stack: Stack, name: str) -> tuple[str, str]:
    """The name and the text of a greedy answer."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["model"], answer.json()["choices"][0]["text"]


def test_an_adapter_is_loaded_while_others_answer(stack: Stack, models: tuple[Models, dict[str, str]]) -> None:
    """By a request, in the third of two slots: all of them and the model at once then answer as transformers does; unloaded,
    its name is a 404, and the others still answer."""
    text = TextProcessor.load(resolve("nano:31b"))
    wanted = {name: greedy(model, text) for name, model in models[0].items()}
    body = {"lora_name": "late", "lora_path": "late"}
    with ThreadPoolExecutor(9) as pool:
        before = pool.map(lambda name: ask(stack, name), [*models[1]] * 2)
        loaded = httpx.post(f"{stack.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert loaded.status_code == 200, loaded.text
        assert list(before) == [(name, wanted[name]) for name in models[1]] * 2
        found = list(pool.map(lambda name: ask(stack, name), [*wanted] * 2))
    assert found == [*wanted.items()] * 2
    assert httpx.get(f"{stack.url}/v1/models/late", timeout=60).json()["parent"] == "nano-31b"
    outside = httpx.post(f"{stack.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"}, timeout=60)
    assert outside.status_code == 400
    assert httpx.post(f"{stack.url}/v1/unload_lora_adapter", json=body, timeout=60).status_code == 200
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        ask(stack, "late")
    assert ask(stack, "farm") == ("farm", wanted["farm"])
