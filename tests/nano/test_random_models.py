"""Nano checkpoints: public layout, seeded bytes, live weights; transformers judges both model and tokenizer."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from engine.front.text import TextProcessor
from tests.nano import nano_shapes
from tests.nano.model_shapes import ModelShape
from tests.nano.nano_shapes import SHAPES, tensors
from tests.nano.nano_tokenizer import SPECIAL_IDS, VOCAB_SIZE
from tests.nano.random_models import build, ensure

pytestmark = pytest.mark.cpu

MEMBERS = list(SHAPES)
SLOW = dict.fromkeys(("e4b", "12b"), pytest.mark.slow)  # their like is asked in the fast tier
TOLERANCE = 1e-4  # what the engine's logits are held to, against these checkpoints in fp32
MIN_RESIDUAL_RMS = 1e-2  # least rms of the residual behind the last layer
PROMPT = 112  # tokens: more than any window

Loaded = tuple[transformers.PreTrainedModel, dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def load(folder: Path) -> Loaded:
    """The model in fp32, and what transformers says of its keys."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), {key: names for key, names in report.items() if names}


def prompt(size: int = PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(110, 230, (1, size), generator=generator)


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits[0]


@torch.no_grad()
def residual_rms(model: transformers.PreTrainedModel) -> float:
    """Root mean square of the residual stream behind the last layer."""
    seen = []
    last = model.model.language_model.layers[-1]
    hook = last.register_forward_hook(lambda _m, _i, out: seen.append(out.pow(2).mean().sqrt().item()))
    model(prompt())
    hook.remove()
    return seen[0]


# ---- the model


@pytest.mark.parametrize("member", MEMBERS)
def test_transformers_loads_it(cache: Path, member: str) -> None:
    """transformers loads the folder with no missing, unexpected or mis-shaped key, and its residual is alive."""
    model, report = load(ensure(member, cache))
    out = logits(model, prompt())
    rms, chance = residual_rms(model), out.softmax(-1)
    entropy = -(chance * chance.clamp_min(1e-30).log()).sum(-1).mean().item()
    print(f"{member}: {type(model).__name__}, residual rms {rms:.3f}, entropy {entropy:.2f} of {np.log(VOCAB_SIZE):.2f}")
    assert report == {}
    assert type(model).__name__.startswith("Gemma4Unified") == SHAPES[member].unified
    assert torch.isfinite(out).all()
    assert rms > MIN_RESIDUAL_RMS
    assert 4.0 < entropy < np.log(VOCAB_SIZE) - 0.1
    assert out.argmax(-1).unique().numel() > 10


def test_a_wrong_key_is_seen(cache: Path, tmp_path: Path) -> None:
    """The key report is not empty when the checkpoint lacks a layer."""
    shutil.copytree(ensure("12b", cache), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    types = [*config["text_config"]["layer_types"], "full_attention"]
    config["text_config"] |= {"layer_types": types, "num_hidden_layers": len(types)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    assert "missing_keys" in load(tmp_path)[1]


def test_a_vanishing_residual_is_seen(cache: Path) -> None:
    """With layer scalars of 1e-3 the residual falls below the bound that the checkpoints pass tenfold."""
    model, _ = load(ensure("31b", cache))
    alive = residual_rms(model)
    for layer in model.model.language_model.layers:
        layer.layer_scalar.fill_(1e-3)
    dead = residual_rms(model)
    assert dead < MIN_RESIDUAL_RMS < MIN_RESIDUAL_RMS * 10 < alive
    assert alive > 100 * dead


@pytest.mark.parametrize("member", [pytest.param(each, marks=SLOW.get(each, ())) for each in MEMBERS])
def test_every_tensor_matters(cache: Path, member: str) -> None:
    """Halving half of any tensor that is not dead moves the logits by 100 tolerances at least."""
    model, _ = load(ensure(member, cache))
    ids = prompt()
    whole, least = logits(model, ids), (float("inf"), "")
    # The final norm takes the last layer's scalar out again.
    inert = f"model.language_model.layers.{SHAPES[member].layers - 1}.layer_scalar"
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors(SHAPES[member]):
        if dead(SHAPES[member], tensor.name) or tensor.name == inert or not tensor.name.startswith("model.language_model."):
            continue
        value = live[tensor.name].data
        kept = value.clone()
        value[..., : max(1, value.shape[-1] // 2)] *= 0.5
        least = min(least, ((logits(model, ids) - whole).abs().max().item(), tensor.name))
        value.copy_(kept)
    print(f"{member}: least change {least[0]:.3f} ({least[1]})")
    assert torch.equal(logits(model, ids), whole)
    assert least[0] >= 100 * TOLERANCE


def dead(shape: ModelShape, name: str) -> bool:
    """K and V projections that the checkpoint carries for layers which read another layer's K and V."""
    parts = name.split(".")
    owns = not (parts[2] == "layers" and shape.is_shared(int(parts[3])))
    return not owns and parts[-2] in ("k_proj", "v_proj", "k_norm")


# ---- the files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shard_tensors(folder: Path) -> dict[str, str]:
    """Name -> dtype over all shards; fails if a name occurs twice or not where the index says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in sorted(set(index.values())):
        with safe_open(folder / shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                assert index[name] == shard
                assert name not in found
                found[name] = file.get_slice(name).get_dtype()
    assert found.keys() == index.keys()
    return found


@pytest.mark.parametrize("member", MEMBERS)
def test_public_layout(cache: Path, member: str) -> None:
    """The folder has the files and shards of a public checkpoint, dead K/V of shared layers included."""
    folder, shape = ensure(member, cache), SHAPES[member]
    names, found = set(contents(folder)), shard_tensors(folder)
    shards = {name for name in names if name.endswith(".safetensors")}
    assert len(shards) >= 2
    assert names - shards == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert set(found.values()) == {"BF16"}
    assert sum(dead(shape, name) for name in found) == 3 * shape.kv_shared


def test_generation_config(cache: Path) -> None:
    """Sampling defaults are the published ones; only the 12B suppresses its two media tokens."""
    for member in MEMBERS:
        value = json.loads((ensure(member, cache) / "generation_config.json").read_text())
        expected = [SPECIAL_IDS["<audio|>"], SPECIAL_IDS["<image|>"]] if member == "12b" else None
        assert value.get("suppress_tokens") == expected
        assert value["eos_token_id"] == [1, 106, 50]
        assert (value["do_sample"], value["temperature"], value["top_k"], value["top_p"]) == (True, 1.0, 64, 0.95)


def test_ensure_builds_once(tmp_path: Path) -> None:
    """Threads and processes that ask at once get one and the same complete folder, and no draft is left behind."""
    code = "import sys, pathlib; from tests.nano.random_models import ensure; print(ensure('31b', pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        mine = set(pool.map(lambda _: ensure("31b", tmp_path), range(4)))
    theirs = {Path(process.communicate(timeout=60)[0].strip()) for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (folder,) = mine | theirs
    assert list(tmp_path.iterdir()) == [folder]
    assert contents(folder) == contents(build("31b", tmp_path / "again"))


def test_a_changed_builder_serves_no_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is written once, and anew beside the old one when the shapes' file has changed."""
    (first,) = {ensure("31b", tmp_path) for _ in range(2)}
    changed = tmp_path / "nano_shapes.py"
    changed.write_text("# another")
    monkeypatch.setattr(nano_shapes, "__file__", str(changed))
    assert ensure("31b", tmp_path) != first
    assert contents(ensure("31b", tmp_path)) == contents(first)


# ---- the tokenizer and the template

any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=80)
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def judge(cache: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(ensure("31b", cache))


@pytest.fixture(scope="module")
def plain(cache: Path) -> Tokenizer:
    return Tokenizer.from_file(str(ensure("31b", cache) / "tokenizer.json"))


@pytest.fixture(scope="module")
def front(cache: Path) -> TextProcessor:
    return TextProcessor.load(ensure("31b", cache))


@PROPERTY
@given(text=any_text)
@example(text="<bos>")
@example(text="<bos><bos> two")
def test_same_ids_as_transformers(front: TextProcessor, judge: Any, plain: Tokenizer, text: str) -> None:
    """AutoTokenizer, the tokenizers library and our front give the same ids, but that the front adds no second <bos>."""
    ids = plain.encode(text).ids
    assert ids[0] == 2
    assert judge(text)["input_ids"] == ids
    assert front.encode(text, add_bos=True) == (ids[1:] if text.startswith("<bos>") else ids)


def test_special_tokens(judge: Any, plain: Tokenizer) -> None:
    """Gemma 4's control tokens stand at their true ids, are single tokens, and are special to transformers too."""
    for name, number in SPECIAL_IDS.items():
        assert plain.encode(name, add_special_tokens=False).ids == [number]
        assert judge.convert_tokens_to_ids(name) == number
        assert plain.decode([number]) == judge.decode([number], skip_special_tokens=True) == ""
    assert [SPECIAL_IDS[name] for name in ("<|turn>", "<turn|>", "<|channel>", "<channel|>")] == [105, 106, 100, 101]
    assert plain.token_to_id("\n") == 107
    assert plain.get_vocab_size() == VOCAB_SIZE
    assert judge.padding_side == "left"
