"""A second architecture, which is a folder (`tests.support.engine.bigram`) and a line; and who names the one that is served."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from deploy.cli.model_files import check_files
from deploy.cli.sizing import weight_bytes_and_count
from engine.architectures import ARCHITECTURES, read_model
from engine.config import EngineConfig, engine_config
from engine.errors import CheckpointError
from engine.plan import Admission, StepPlan, single_rows
from engine.protocol import SamplingParams
from engine.rank.builder import Rank, build, load_rank
from engine.rank.parallel import Single
from tests.bench.profiling import bare_rank
from tests.support.engine.bigram.bigram_architecture import BIGRAM
from tests.support.engine.plans import PageAppend, PrefillChunk
from tests.support.engine.ranks import run
from tests.support.repo_rules import ROOT, sources

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
PAGES = (4,)
WORDS, WIDTH = 96, 80


@pytest.fixture(autouse=True)
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line."""
    monkeypatch.setattr("engine.architectures.ARCHITECTURES", [*ARCHITECTURES, BIGRAM])


@pytest.fixture
def config(line: None, tmp_path: Path) -> EngineConfig:
    """Of a folder with this model's tensors: the id i + 1 follows i."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bigram", "words": WORDS, "width": WIDTH}))
    rows = torch.nn.functional.normalize(torch.randn((WORDS, WIDTH), generator=torch.Generator().manual_seed(0)))
    save_file({"first": rows, "second": rows.roll(1, 0).contiguous()}, tmp_path / "model.safetensors")
    return engine_config(model=str(tmp_path), device="cpu", dtype="float32", pages=PAGES, max_seqs=4, max_len=64, prefill_budget=64)


def tokens(rank: Rank, prompt: list[int], steps: int) -> list[int]:
    """What a runner of the rank gives, greedily."""
    runner = build(rank, PAGES)
    admission = Admission(0, 1, prompt, len(prompt), SamplingParams(max_tokens=steps))
    plan = StepPlan(1, admissions=[admission], chunks=[PrefillChunk(0, 0, len(prompt), len(prompt) - 1)])
    plan.appends.append(PageAppend(0, 0, 0, 1))
    rest = [StepPlan(step, rows=single_rows([0])) for step in range(2, steps + 1)]
    return [run(runner, each).row(0).tokens[0] for each in (plan, *rest)]


def test_a_rank_of_any_architecture_runs(config: EngineConfig) -> None:
    """Its checkpoint is checked, loaded, built and run by plans; with another table it would go on otherwise."""
    rank = load_rank(config, Single(), CPU)
    assert tokens(rank, [7, 3, 40], 5) == [41, 42, 43, 44, 45]
    rank.model.head.head.weight.copy_(rank.model.head.head.weight.roll(1, 0))
    assert tokens(rank, [7, 3, 40], 5) == [42, 44, 46, 48, 50]


def test_its_table_says_what_a_checkpoint_must_hold(config: EngineConfig) -> None:
    """A tensor that its table does not name, and one that it names and is not there, are refused by their published names: by a
    rank, and by `quartet check-config`."""
    save_file({"first": torch.zeros(2, 2), "third": torch.zeros(2)}, Path(config.model) / "model.safetensors")
    complaint = r"bigram\.second is missing; third is unexpected; "
    with pytest.raises(CheckpointError, match=complaint):
        load_rank(config, Single(), CPU)
    with pytest.raises(CheckpointError, match=complaint):
        check_files(config, None)


def test_plan_counts_its_weights(config: EngineConfig) -> None:
    """Two tables in fp32; of a wider one more."""
    assert weight_bytes_and_count(config) == (2 * WORDS * WIDTH * 4, 2 * WORDS * WIDTH)
    (Path(config.model) / "config.json").write_text(json.dumps({"model_type": "bigram", "words": WORDS, "width": 2 * WIDTH}))
    assert weight_bytes_and_count(msgspec.structs.replace(config))[1] == 4 * WORDS * WIDTH


def test_random_weights_and_empty_ones(config: EngineConfig) -> None:
    """The same builder draws its weights, and profiles it; on the meta device its shard has sizes and nothing is read."""
    drawn = load_rank(msgspec.structs.replace(config, load_format="dummy"), Single(), CPU, checked=False)
    bare = bare_rank.build(drawn, PAGES)
    assert all(parameter.std() > 0 for parameter in bare.model.parameters())
    (Path(config.model) / "model.safetensors").unlink()
    empty = load_rank(config, Single(), torch.device("meta"), checked=False)
    assert [each.shape for each in empty.model.parameters()] == [each.shape for each in drawn.model.parameters()]


def test_what_no_line_names_is_refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the line the folder is of no model that is known; a config.json may lack its model_type, or say what is none."""
    assert read_model(Path(config.model)).vocab == WORDS
    monkeypatch.setattr("engine.architectures.ARCHITECTURES", ARCHITECTURES)
    with pytest.raises(CheckpointError, match=r"config.json: model_type 'bigram' is not one of gemma4, gemma4_text"):
        read_model(Path(config.model))
    for wrong in ({}, {"model_type": ["gemma4"]}):
        (Path(config.model) / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"config.json: model_type (None|\['gemma4'\]) is not one of"):
            read_model(Path(config.model))


def test_who_names_the_served_architecture() -> None:
    """Its own files, and the registry."""
    named = {str(path.relative_to(ROOT)) for path in sources() if re.search(r"\b(?:Gemma4|GEMMA4)\b", path.read_text())}
    models = "engine/rank/models"
    assert named == {"engine/architectures.py", f"{models}/gemma4.py", f"{models}/gemma4_checkpoints.py"}
