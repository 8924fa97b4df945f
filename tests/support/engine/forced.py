"""A plan stream run again on the tokens that were recorded, whatever this runner samples: two backends keep the same inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.rank.runner import Runner
from tests.support.engine.plans import result_rows

NO_MASKS: Mapping[int, bytes] = {}


@dataclass(frozen=True)
class Sampled:
    """What one step gave: the result, and its rows' final hidden, fp32 [rows, hidden]."""

    result: StepResult
    hidden: Tensor


@torch.inference_mode()
def forced(
    runner: Runner, plans: Sequence[StepPlan], recorded: Sequence[StepResult] | None = None, masks: Mapping[int, bytes] = NO_MASKS
) -> list[Sampled]:
    """Each plan alone; behind it the tokens of `recorded` replace those that were sampled (None: they stay). Needs debug_hash."""
    assert runner.report_stage.debug_hash
    found = []
    for at, plan in enumerate(plans):
        launched = runner.launch(encode_plan(plan), masks.get(plan.step, b""))
        result, host = decode_result(launched.result()), launched.outputs()
        launched.fold()
        found.append(Sampled(result, _hidden(host.get("hidden"), runner)))
        if recorded is not None:
            _force(runner, recorded[at])
    return found


def _hidden(rows: np.ndarray | None, runner: Runner) -> Tensor:
    dtype = runner.slots.cache.groups[0].pool.dtype
    return torch.zeros(0, 1) if rows is None else torch.from_numpy(rows).view(dtype).float()


def _force(runner: Runner, result: StepResult) -> None:
    """The next decode row of each slot reads the recorded token."""
    lengths = runner.slots.lengths.tolist()
    for row in result_rows(result):
        if row.tokens:
            runner.slots.tokens[row.slot, lengths[row.slot]] = row.tokens[0]


def agreement(found: Sequence[Sampled], want: Sequence[Sampled]) -> float:
    """The share of rows that sampled the same tokens."""
    pairs = [
        (one.tokens, other.tokens)
        for mine, theirs in zip(found, want, strict=True)
        for one, other in zip(result_rows(mine.result), result_rows(theirs.result), strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


def hidden_errors(found: Sequence[Sampled], want: Sequence[Sampled]) -> Tensor:
    """fp32 [rows of all steps]: each final hidden row's error, as a part of its norm."""
    mine, theirs = (torch.cat([step.hidden for step in steps if len(step.hidden)]) for steps in (found, want))
    return ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).nan_to_num(torch.inf)
