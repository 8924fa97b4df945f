"""A member with adapters beside transformers' verdicts, run over paged caches: rows of two adapters and of none in each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from engine.geometry import Geometry, read_geometry
from engine.quantisation import read_quantisation
from engine.rank.adapter_store import load_adapters
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel
from tests.support.engine.paged import Logits, caches, run_steps, script
from tests.support.judge.oracle import Verdict, judge, soft_cap

TOLERANCE = 1e-4  # fp32
FAULT = 100 * TOLERANCE
PAGES = 40
LENGTHS = ((70, 5), (41, 6), (55, 5))
SLOTS = (0, -1, 1)  # the adapter of each slot


@dataclass(frozen=True)
class Case:
    """A member with two adapters, and transformers' verdict on each slot's sequence."""

    folder: Path
    geometry: Geometry
    adapters: Mapping[str, str]
    ids: tuple[Tensor, ...]
    verdicts: tuple[Verdict, ...]
    weights: str = "auto"

    def model(self, parallel: Parallel) -> Gemma4:
        model = Gemma4(self.geometry, parallel, torch.float32, torch.device("cpu"))
        load(model, TENSORS, self.folder, read_quantisation(self.folder, self.weights))
        load_adapters(model, TENSORS, self.adapters)
        return model

    def run(self, parallel: Parallel, slots: tuple[int, ...] = SLOTS) -> Logits:
        steps = script(self.geometry, LENGTHS, PAGES, 3, whole=False)
        cache = caches(self.geometry, parallel.size, len(LENGTHS), 80, PAGES)
        return run_steps(self.model(parallel), cache, steps, self.ids, adapters=slots)

    def error(self, found: Logits, verdicts: tuple[Verdict, ...] | None = None) -> float:
        """The largest difference of logits where no router's near tie has come before."""
        theirs = verdicts or self.verdicts
        sure = [place for place in found if place[1] < theirs[place[0]].sure]
        assert len(sure) >= 0.3 * len(found), (len(sure), len(found))
        ours = soft_cap(torch.stack([found[place] for place in sure]), self.geometry.softcap)
        right = torch.stack([theirs[slot].logits[position] for slot, position in sure])
        return (ours - right).abs().nan_to_num(torch.inf).max().item()


def verdicts_of(models: Sequence[transformers.PreTrainedModel], ids: Sequence[Tensor]) -> tuple[Verdict, ...]:
    """Of each slot, by the model of its adapter; the last one has none."""
    return tuple(judge(models[adapter], row) for adapter, row in zip(SLOTS, ids, strict=True))


def case_of(folder: Path, adapters: Mapping[str, str], models: Sequence[transformers.PreTrainedModel]) -> Case:
    """Random sequences for the model in `folder`, judged by `models`."""
    geometry = read_geometry(folder)
    generator = torch.Generator().manual_seed(12)
    ids = tuple(torch.randint(3, geometry.vocab, (sum(length),), generator=generator) for length in LENGTHS)
    return Case(folder, geometry, adapters, ids, verdicts_of(models, ids))
