"""Folders that others have saved: a head of their own or the embedding's again, other prefixes, formats that are refused."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from engine.config import engine_config
from engine.errors import CheckpointError
from engine.geometry import Geometry, read_geometry
from engine.rank.builder import load_rank
from engine.rank.load import loader
from engine.rank.load.loader import load, with_head
from engine.rank.load.slices import allocate, pieces
from engine.rank.load.tensor_files import checked_headers
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.checkpoints import Tensors, rewrite
from tests.support.engine.paged import caches, run_steps, script
from tests.support.engine.ranks import single
from tests.support.engine.threads import ThreadParallel, run_ranks
from tests.support.judge import assistants
from tests.support.judge.oracle import judge, load_oracle, soft_cap

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4  # fp32: as of all logits against transformers'
FAULT = 100 * TOLERANCE
LENGTH = 24
PAGES = 8
TEXT = "model.language_model."
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"

Nano = Callable[[str], Path]


@pytest.fixture
def copy(nano: Nano, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano("e2b"), tmp_path / "copy"))


def ids(geometry: Geometry) -> Tensor:
    return torch.randint(3, geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(5))


def ours(folder: Path, geometry: Geometry | None = None, size: int = 1) -> Tensor:
    """Soft-capped logits [LENGTH, vocab] of what the loader makes of the folder, of rank 0 of `size`."""
    geometry = geometry or with_head(read_geometry(folder), TENSORS, folder)

    def run(parallel: Parallel) -> Tensor:
        model = Gemma4(geometry, parallel, torch.float32, torch.device("cpu"))
        load(model, TENSORS, folder)
        steps = script(geometry, ((LENGTH, 0),), PAGES, 1, whole=True)
        rows = run_steps(model, caches(geometry, parallel.size, 1, LENGTH, PAGES), steps, [ids(geometry)])
        return soft_cap(torch.stack([rows[0, position] for position in range(LENGTH)]), geometry.softcap)

    def on_thread(parallel: ThreadParallel) -> Tensor:
        return run(parallel)

    return run(Single()) if size == 1 else run_ranks(size, on_thread)[0]


def error(logits: Tensor, theirs: Tensor) -> float:
    return (logits - theirs).abs().nan_to_num(torch.inf).max().item()


def transformers_logits(folder: Path) -> Tensor:
    return judge(load_oracle(folder), ids(read_geometry(folder))).logits


# ---- heads


def add_head(folder: Path, head: Callable[[Tensor], Tensor]) -> None:
    rewrite(folder, lambda tensors: tensors | {HEAD: head(tensors[TEXT + EMBEDDING])})


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_like_the_embedding_is_dropped(copy: Path, tie: bool) -> None:
    """A saved copy of the embedding loads as a tied head whatever config.json says."""
    before = ours(copy)
    add_head(copy, torch.clone)
    set_tied(copy, tie)
    geometry = with_head(read_geometry(copy), TENSORS, copy)
    assert geometry.tied
    assert HEAD not in pieces(TENSORS, geometry, 0, 1)
    assert torch.equal(ours(copy), before)


def set_tied(folder: Path, tie: bool) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"tie_word_embeddings": true', f'"tie_word_embeddings": {str(tie).lower()}'))
    assert read_geometry(folder).tied == tie


@pytest.mark.parametrize("size", [1, 2])
def test_an_untied_head_is_used(copy: Path, size: int) -> None:
    """With a head of its own a checkpoint gives transformers' logits, also at TP 2; with the embedding for a head it does not."""
    add_head(copy, lambda table: torch.randn(table.shape, generator=torch.Generator().manual_seed(3)).to(table.dtype) / 9)
    tied = read_geometry(copy)
    geometry = with_head(tied, TENSORS, copy)
    assert (tied.tied, geometry.tied) == (True, False)
    set_tied(copy, False)
    theirs = transformers_logits(copy)
    assert error(ours(copy, size=size), theirs) < TOLERANCE
    assert error(ours(copy, tied, size), theirs) > FAULT


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_rank_looks_for_a_head(copy: Path, load_format: str) -> None:
    """A rank that loads the folder has the saved head; one of random weights is as config.json says."""
    add_head(copy, torch.zeros_like)
    config = engine_config(model=str(copy), device="cpu", dtype="float32", load_format=load_format)
    rank = single(config)
    assert rank.geometry.tied == (load_format == "dummy")
    assert bool(rank.model.head.head.weight.any()) == rank.geometry.tied


@pytest.mark.parametrize("cut", [torch.flatten, lambda table: table[:, :0], lambda table: table[0, 0], lambda table: table[:-1]])
def test_a_head_like_an_embedding_of_a_wrong_shape_is_refused(copy: Path, cut: Callable[[Tensor], Tensor]) -> None:
    """As any tensor of a wrong shape is, by its name; beside it a head of the right shape is one of its own."""
    add_head(copy, torch.zeros_like)
    geometry = with_head(read_geometry(copy), TENSORS, copy)
    checked_headers(copy, pieces(TENSORS, geometry, 0, 1), TENSORS, geometry)
    rewrite(copy, lambda tensors: tensors | {name: cut(tensors[TEXT + EMBEDDING]).clone() for name in (TEXT + EMBEDDING, HEAD)})
    geometry = with_head(geometry, TENSORS, copy)
    with pytest.raises(CheckpointError, match=rf"{EMBEDDING} has shape .* {HEAD} has shape"):
        checked_headers(copy, pieces(TENSORS, geometry, 0, 1), TENSORS, geometry)


def test_heads_are_compared_to_the_last_row(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of the last row makes a head one of its own, compared in many blocks."""
    monkeypatch.setattr(loader, "_BLOCK_BYTES", 1 << 12)

    def head(table: Tensor) -> Tensor:
        changed = table.clone()
        changed[-1, -1] += 1
        return changed

    add_head(copy, head)
    assert not with_head(read_geometry(copy), TENSORS, copy).tied


def test_a_head_that_config_promises_must_be_there(copy: Path) -> None:
    """An untied head without tensor is named as missing, and counts as a parameter of its size."""
    tied = read_geometry(copy)
    set_tied(copy, False)
    geometry = with_head(read_geometry(copy), TENSORS, copy)
    assert not geometry.tied
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        checked_headers(copy, pieces(TENSORS, geometry, 0, 1), TENSORS, geometry)
    models = [Gemma4(each, Single(), torch.bfloat16, torch.device("meta")) for each in (tied, geometry)]
    for model in models:
        allocate(model, TENSORS)
    one, two = (sum(parameter.nbytes for parameter in model.parameters()) for model in models)
    assert two - one == 2 * tied.vocab * tied.hidden


# ---- names


def renamed(prefix: str, *, towers: str = "model.") -> Callable[[Tensors], Tensors]:
    """Text tensors under `prefix`, a tower's beside them under `towers`."""

    def edit(tensors: Tensors) -> Tensors:
        text = {prefix + name.removeprefix(TEXT): tensor for name, tensor in tensors.items() if name.startswith(TEXT)}
        return text | {f"{towers}vision_tower.x": torch.zeros(2, dtype=torch.int8)}

    return edit


@pytest.mark.parametrize(
    ("prefix", "towers"), [("language_model.model.", ""), ("language_model.", ""), ("model.", "model."), ("", ""), (TEXT, "model.")]
)
def test_other_prefixes_load_alike(nano: Nano, copy: Path, prefix: str, towers: str) -> None:
    """Text tensors under any prefix that classes of transformers write give the same logits, bit for bit; others are named."""
    rewrite(copy, renamed(prefix, towers=towers))
    assert torch.equal(ours(copy), ours(nano("e2b")))
    rewrite(copy, lambda tensors: tensors | {f"foreign.{prefix}norm.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=re.escape(f"foreign.{prefix}norm.weight is unexpected")):
        ours(copy)


@pytest.mark.parametrize("part", ["text model with head", "text model", "whole without head"])
def test_what_classes_of_transformers_save(nano: Nano, tmp_path: Path, part: str) -> None:
    """Saved by itself, the text model, with its head or without, and the model without head give transformers' logits."""
    folder = nano("26b-a4b")
    whole = load_oracle(folder)
    text = transformers.Gemma4ForCausalLM(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    {"text model with head": text, "text model": text.model, "whole without head": whole.model}[part].save_pretrained(tmp_path)
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert not any(name.startswith(TEXT) for name in names)
    verdict = judge(whole, ids(read_geometry(folder)))
    assert verdict.sure > LENGTH // 2
    assert error(ours(tmp_path)[: verdict.sure], verdict.logits[: verdict.sure]) < TOLERANCE
    assert error(ours(tmp_path)[1 : verdict.sure], verdict.logits[: verdict.sure - 1]) > FAULT


def test_one_tensor_under_two_names_is_refused(copy: Path) -> None:
    """Two spellings of one tensor are named: which of them counts is not ours to say."""
    rewrite(copy, lambda tensors: tensors | {"language_model.norm.weight": tensors[TEXT + "norm.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"norm\.weight and \S*norm\.weight are names of one tensor"):
        ours(copy)


# ---- formats


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_weights_without_their_scales_are_refused(copy: Path, dtype: torch.dtype) -> None:
    """A folder whose config says nothing of its 8-bit weights is refused by their dtype: without scales they are other numbers."""
    name = TEXT + "layers.0.mlp.down_proj.weight"
    rewrite(copy, lambda tensors: tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(CheckpointError, match=re.escape(name) + r" has dtype (F8_E4M3|F8_E5M2|I8|U8), not one of BF16, F16, F32$"):
        ours(copy)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    assistants.write(SHAPES["e2b"], folder)
    return folder


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e30])
@pytest.mark.parametrize(
    "name",
    [
        TEXT + "layers.1.mlp.down_proj.weight",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.audio_tower.subsample_conv_projection.input_proj_linear.weight",
        "post_projection.weight",
    ],
)
def test_weights_that_are_no_numbers_are_refused(copy: Path, drafter: Path, tmp_path: Path, name: str, value: float) -> None:
    """NaN or infinity in one element of the text model, an encoder or the drafter: whichever rank's slice has it names the tensor.
    A large number is a weight like others."""
    guesser = Path(shutil.copytree(drafter, tmp_path / "guesser"))

    def edit(tensors: Tensors) -> None:
        tensors[name].flatten()[-1] = value

    rewrite(copy if name.startswith("model.") else guesser, edit)
    config = engine_config(model=str(copy), device="cpu", dtype="float32", tp=2, mtp={"model": str(guesser), "drafts": 1})
    words = re.escape(f"{name} has NaN or infinity in rows ")
    with pytest.raises(CheckpointError, match=words) if value != 1e30 else nullcontext():
        run_ranks(2, lambda parallel: load_rank(config, parallel, torch.device("cpu")))
