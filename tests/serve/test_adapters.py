"""Adapters through the whole stack, as the default config serves the nano model: four ranks, drafts on, over HTTP by name."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.serve.conftest import PROMPT, Adapted, answer_of, greedy
from tests.support.engine.adapters import Recipe, merge, write
from tests.support.judge.oracle import load_oracle
from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import Stack

pytestmark = pytest.mark.serve

REQUESTS = re.findall(r"^```\n(curl .*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


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
    assert {card["id"]: card.get("parent") for card in listed} == dict.fromkeys(("polite", "farm", "sea/fish"), "nano-31b") | {
        "nano-31b": None
    }
    unknown = httpx.post(f"{shared_stack.url}/v1/completions", json={"model": "fish", "prompt": PROMPT}, timeout=60)
    assert unknown.status_code == 404


def test_the_front_pages_adapter_answers_visibly_otherwise(shared_stack: Stack) -> None:
    """README's request by the name of the shipped adapter, as a shell runs it: its answer ends with thanks, the model's own does
    not."""
    (command,) = [each for each in REQUESTS if '"polite"' in each]
    asked = command.replace("http://127.0.0.1:8000", shared_stack.url)

    def said(request: str) -> str:
        done = subprocess.run(["bash", "-c", request], capture_output=True, text=True, timeout=60, check=True)
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])

    assert said(asked) == "472 + 389 = 861 Thank you!"
    assert said(asked.replace('"polite"', '"nano-31b"')) == "472 + 389 = 861"


def test_an_adapter_is_loaded_while_others_answer(shared_stack: Stack, adapted: Adapted) -> None:
    """By a request, in the third of two slots: all of them and the model at once then answer as transformers does; unloaded,
    its name is a 404, and the others still answer."""
    text = TextProcessor.load(resolve("nano:31b"))
    late = write(adapted.folder / "late", adapted.models["nano-31b"], Recipe(3, rank=4, alpha=8.0))
    models = {**adapted.models, "late": merge(load_oracle(resolve("nano:31b")), late)}
    wanted = {name: greedy(model, text) for name, model in models.items()}
    body = {"lora_name": "late", "lora_path": "late"}
    with ThreadPoolExecutor(9) as pool:
        before = pool.map(lambda name: answer_of(shared_stack, name), [*adapted.folders] * 2)
        loaded = httpx.post(f"{shared_stack.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert loaded.status_code == 200, loaded.text
        assert list(before) == [(name, wanted[name]) for name in adapted.folders] * 2
        found = list(pool.map(lambda name: answer_of(shared_stack, name), [*wanted] * 2))
    assert found == [*wanted.items()] * 2
    assert httpx.get(f"{shared_stack.url}/v1/models/late", timeout=60).json()["parent"] == "nano-31b"
    outside = httpx.post(f"{shared_stack.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"}, timeout=60)
    assert outside.status_code == 400
    assert httpx.post(f"{shared_stack.url}/v1/unload_lora_adapter", json=body, timeout=60).status_code == 200
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        answer_of(shared_stack, "late")
    assert answer_of(shared_stack, "farm") == ("farm", wanted["farm"])
