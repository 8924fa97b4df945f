"""Adapters that are loaded through the whole stack while it serves: four ranks, drafts on, over HTTP by name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.serve.conftest import Adapted, answer_of, greedy
from tests.support.engine.adapters import Recipe, merge, write
from tests.support.judge.oracle import load_oracle
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve

Models = dict[str, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def models(adapted: Adapted) -> tuple[Models, dict[str, str]]:
    """Transformers' model by the name of each, with an adapter that the config lacks; and the config's adapters."""
    late = write(Path(adapted.folders["farm"]).parent / "late", adapted.models["nano-31b"], Recipe(3, rank=4, alpha=8.0))
    return {**adapted.models, "late": merge(load_oracle(resolve("nano:31b")), late)}, adapted.folders


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


def test_an_adapter_is_loaded_while_others_answer(stack: Stack, models: tuple[Models, dict[str, str]]) -> None:
    """By a request, in the third of two slots: all of them and the model at once then answer as transformers does; unloaded,
    its name is a 404, and the others still answer."""
    text = TextProcessor.load(resolve("nano:31b"))
    wanted = {name: greedy(model, text) for name, model in models[0].items()}
    body = {"lora_name": "late", "lora_path": "late"}
    with ThreadPoolExecutor(9) as pool:
        before = pool.map(lambda name: answer_of(stack, name), [*models[1]] * 2)
        loaded = httpx.post(f"{stack.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert loaded.status_code == 200, loaded.text
        assert list(before) == [(name, wanted[name]) for name in models[1]] * 2
        found = list(pool.map(lambda name: answer_of(stack, name), [*wanted] * 2))
    assert found == [*wanted.items()] * 2
    assert httpx.get(f"{stack.url}/v1/models/late", timeout=60).json()["parent"] == "nano-31b"
    outside = httpx.post(f"{stack.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"}, timeout=60)
    assert outside.status_code == 400
    assert httpx.post(f"{stack.url}/v1/unload_lora_adapter", json=body, timeout=60).status_code == 200
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        answer_of(stack, "late")
    assert answer_of(stack, "farm") == ("farm", wanted["farm"])
