"""A rank of an architecture that no file of the product names, and who names the one that is served."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.geometry import Geometry, read_geometry
from engine.plan import Admission, StepPlan, single_rows
from engine.protocol import SamplingParams
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch
from engine.rank.builder import Rank, build, load_rank
from engine.rank.load.tensor_table import Rule, TensorTable
from engine.rank.models.architecture import Architecture, Model
from engine.rank.models.layers import VocabTable
from engine.rank.parallel import Single
from kernels.fused_allreduce_norm import AllReduceInbox
from tests.bench.profiling import bare_rank
from tests.conftest import Nano
from tests.support.engine.plans import PageAppend, PrefillChunk
from tests.support.engine.ranks import run
from tests.support.engine.recording import config_of
from tests.support.repo_rules import ROOT, sources

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
PAGES = (4, 4)


class Bigram(Model):
    """logits of the next id = (row of the id before) E^T; no layers, K or V."""

    def __init__(self, geometry: Geometry, parallel: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, parallel, dtype, device)
        self.first = VocabTable(self, geometry.vocab, geometry.hidden)
        self.second = VocabTable(self, geometry.vocab, geometry.hidden)
        self.frequencies = {}

    @property
    def head(self) -> VocabTable:
        return self.second

    def embed(self, ids: Tensor, _: object) -> Tensor:
        return self.first(ids)

    def states(
        self, batch: ForwardBatch, attention: AttentionBackend, peers: AllReduceInbox | None = None
    ) -> tuple[Tensor, Tensor]:
        ids = batch.ids if batch.logit_rows is None else batch.ids[batch.logit_rows]
        h = self.first(ids)
        return h, h


def read(folder: Path) -> Geometry:
    return replace(read_geometry(folder), vocab=96)


BIGRAM = Architecture(
    read,
    TensorTable(
        (
            Rule("first", "first.head", "vocab hidden", "vocab", "embedding"),
            Rule("second", "second.head", "vocab hidden", "vocab", "embedding"),
        ),
        lambda *_: {},
        published_name=lambda name, _: f"bigram.{name.removeprefix('bigram.')}",
        is_unused=lambda name, _: False,
    ),
    Bigram,
)


@pytest.fixture
def config(nano: Nano, tmp_path: Path) -> EngineConfig:
    """Of a folder with this model's tensors: the id i + 1 follows i."""
    (tmp_path / "config.json").write_bytes((nano("31b") / "config.json").read_bytes())
    geometry = read(tmp_path)
    rows = torch.nn.functional.normalize(torch.randn((geometry.vocab, geometry.hidden), generator=torch.Generator().manual_seed(0)))
    save_file({"first": rows, "second": rows.roll(1, 0).contiguous()}, tmp_path / "model.safetensors")
    return config_of(tmp_path, 1, pages=PAGES, language_model_only=True)


def tokens(rank: Rank, prompt: list[int], steps: int) -> list[int]:
    """What a runner of the rank gives, greedily."""
    runner = build(rank, PAGES)
    admission = Admission(0, 1, prompt, len(prompt), SamplingParams(max_tokens=steps))
    plan = StepPlan(1, admissions=[admission], chunks=[PrefillChunk(0, 0, len(prompt), len(prompt) - 1)])
    plan.appends.extend(PageAppend(group, 0, 0, 1) for group in (0, 1))
    rest = [StepPlan(step, rows=single_rows([0])) for step in range(2, steps + 1)]
    return [run(runner, each).row(0).tokens[0] for each in (plan, *rest)]


def test_a_rank_of_any_architecture_runs(config: EngineConfig) -> None:
    """A checkpoint of another model is checked, loaded, built and run by plans; of another table it would go on otherwise."""
    rank = load_rank(config, Single(), CPU, BIGRAM)
    assert tokens(rank, [7, 3, 40], 5) == [41, 42, 43, 44, 45]
    rank.model.head.head.weight.copy_(rank.model.head.head.weight.roll(1, 0))
    assert tokens(rank, [7, 3, 40], 5) == [42, 44, 46, 48, 50]


def test_its_table_says_what_a_checkpoint_must_hold(config: EngineConfig) -> None:
    """A tensor that its table does not name, and one that it names and is not there, are refused by their published names."""
    save_file({"first": torch.zeros(2, 2), "third": torch.zeros(2)}, Path(config.model) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"bigram\.second is missing; third is unexpected; "):
        load_rank(config, Single(), CPU, BIGRAM)


def test_random_weights_and_empty_ones(config: EngineConfig) -> None:
    """The same builder draws its weights, and profiles it; on the meta device its shard has sizes and nothing is read."""
    drawn = load_rank(msgspec.structs.replace(config, load_format="dummy"), Single(), CPU, BIGRAM, checked=False)
    bare = bare_rank.build(drawn, PAGES)
    assert all(parameter.std() > 0 for parameter in bare.model.parameters())
    (Path(config.model) / "model.safetensors").unlink()
    empty = load_rank(config, Single(), torch.device("meta"), BIGRAM, checked=False)
    assert [each.shape for each in empty.model.parameters()] == [each.shape for each in drawn.model.parameters()]


def test_who_names_the_served_architecture() -> None:
    """Its own file, and the builder, once as what is built by default."""
    named = {str(path.relative_to(ROOT)): len(re.findall(r"\b(?:Gemma4|GEMMA4)\b", path.read_text())) for path in sources()}
    assert {name for name, count in named.items() if count} == {"engine/rank/builder.py", "engine/rank/models/gemma4.py"}
    assert named["engine/rank/builder.py"] == 2  # its import
