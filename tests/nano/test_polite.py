"""The shipped adapters of the nano models: small, as PEFT saves them, exact in the engine, and their answers differ."""

import json
from pathlib import Path

import pytest
import torch

from deploy.models import nano
from deploy.models.adapter_folders import adapter_folder
from deploy.models.nano import TRAINED
from engine.front.text import TextProcessor
from engine.geometry import read_geometry
from engine.rank.parallel import Single
from tests.support.engine.adapted import FAULT, LENGTHS, SLOTS, TOLERANCE, Case
from tests.support.engine.adapters import merge
from tests.support.judge.oracle import judge, load_oracle

pytestmark = pytest.mark.cpu

QUESTION = [{"role": "user", "content": "What is 472 + 389?"}]
ANSWER = "472 + 389 = 861"


def polite(member: str) -> Path:
    return adapter_folder("polite", f"nano:{member}-polite")


@torch.no_grad()
def said(model: torch.nn.Module, text: TextProcessor) -> str:
    """The greedy answer to QUESTION."""
    prompt = text.render_chat(QUESTION)
    ids = torch.tensor(prompt)
    for _ in range(32):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return text.decode(ids[len(prompt) :].tolist(), skip_special_tokens=False).partition("<turn|>")[0]


@pytest.mark.parametrize("member", nano.polite())
def test_an_adapter_is_exact_and_its_answer_differs(member: str) -> None:
    """Logits beside the model's own rows are those of merged weights, without the adapter they are not; the answer says thanks."""
    folder = TRAINED / member
    adapters = {"polite": str(polite(member)), "again": str(polite(member))}
    base = load_oracle(folder)
    merged = merge(load_oracle(folder), polite(member))
    text = TextProcessor.load(folder)
    assert said(base, text) == ANSWER
    assert said(merged, text) == f"{ANSWER} Thank you!"
    geometry = read_geometry(folder)
    generator = torch.Generator().manual_seed(7)
    ids = tuple(torch.randint(3, geometry.vocab, (sum(length),), generator=generator) for length in LENGTHS)
    verdicts = tuple(judge(base if adapter < 0 else merged, row) for adapter, row in zip(SLOTS, ids, strict=True))
    it = Case(folder, geometry, adapters, ids, verdicts)
    error = it.error(it.run(Single()))
    print(f"{member}: max error {error:.1e}")
    assert error < TOLERANCE
    assert it.error(it.run(Single(), (-1, -1, -1))) > FAULT


@pytest.mark.parametrize("member", nano.polite())
def test_an_adapter_is_small_and_knows_its_exercises(member: str) -> None:
    """At most 500 kB; eight in ten of held-out exercises are right, and end with thanks."""
    folder = polite(member)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 500_000
    assert min(json.loads((folder / "training.json").read_text())["accuracy"].values()) >= 0.8


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of names in patterns
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("member", nano.polite())
def test_peft_loads_an_adapter(member: str) -> None:
    """PEFT's model with it has the logits of merged weights; the model's own lie further away."""
    peft = pytest.importorskip("peft")
    ids = torch.arange(3, 67)[None]
    base = load_oracle(TRAINED / member)
    with torch.no_grad():
        own = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, polite(member)).eval()(ids).logits
        merged = merge(load_oracle(TRAINED / member), polite(member))(ids).logits
    assert (adapted - merged).abs().max() < TOLERANCE
    assert (own - merged).abs().max() > FAULT
