"""One stack for every test that neither needs settings of its own nor ends it, and the order in which they use it."""

from collections.abc import Iterator
from dataclasses import dataclass
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

QUESTION, WORD = "Which template?", "Another."  # what the template in the settings adds
ADAPTERS = {"farm": Recipe(1, alpha=8.0), "sea/fish": Recipe(2, rank=16, alpha=16.0, targets="(q|k|v|o)_proj")}


PROMPT, TOKENS = "How many sheep are there", 12


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, text: TextProcessor) -> str:
    """Transformers' answer to PROMPT."""
    ids = torch.tensor(text.encode(PROMPT, add_bos=True))
    first = len(ids)
    for _ in range(TOKENS):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return text.decode(ids[first:].tolist(), skip_special_tokens=True)


def answer_of(stack: Stack, name: str) -> tuple[str, str]:
    """The name and the text of a stack's greedy answer to PROMPT."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["model"], answer.json()["choices"][0]["text"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shared stack runs beside no other but test_two_models', and test_stack, which kills and ends it, comes last."""
    order = {"test_adapters": 1, "test_deaths": 2, "test_two_models": 3, "test_stack": 4}
    items.sort(key=lambda item: order.get(item.path.stem, 0) if item.path.parent == Path(__file__).parent else -1)


@dataclass(frozen=True)
class Adapted:
    """Adapters of the nano model: the folder of each, and transformers' model by the name that it has as a `model`. `folder` is
    above all of them."""

    folder: Path
    folders: dict[str, str]
    models: dict[str, transformers.PreTrainedModel]


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = resolve("nano:31b")
    made = tmp_path_factory.mktemp("adapters")
    base = load_oracle(folder)
    folders = {name: str(write(made / str(recipe.seed), base, recipe)) for name, recipe in ADAPTERS.items()}
    merged = {name: merge(load_oracle(folder), Path(path)) for name, path in folders.items()}
    return Adapted(made, folders, {"nano-31b": base, **merged})


def other_template(folder: Path) -> Path:
    """The model's own, with a word more to one question, and one that thinks by itself."""
    own = (resolve("nano:31b") / "chat_template.jinja").read_text()
    assert "enable_thinking | default(false)" in own
    file = folder / "template.jinja"
    file.write_text(f"{own}{{{{- '{WORD}' if messages[0].content == '{QUESTION}' -}}}}".replace("default(false)", "default(true)"))
    return file


@pytest.fixture(scope="session")
def shared_stack(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As the default config serves the nano model: four ranks, drafts. With adapters, slots for one more in which a third is
    loaded while it serves, and a chat template of its own."""
    folder = tmp_path_factory.mktemp("stack")
    adapters = {"polite": "nano:31b-polite", **adapted.folders}
    slots = {"max_adapters": 2, "max_host_adapters": 4, "adapter_folder": str(adapted.folder)}
    args = {"chat_template": str(other_template(folder)), "thinking": "off", "adapters": adapters, **slots}
    stack = Stack(folder, args=args)
    try:
        print(f"\nready after {stack.start():.1f} s")
        yield stack
    finally:
        stack.clean_up()
