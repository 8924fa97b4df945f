"""One plan in, one result out.

    launch   apply the plan -> forward -> sample -> store the tokens -> start the copy out      the host waits for nothing
    finish   wait for the copy -> fold the state hash -> StepResult                            in plan order

Two steps may be launched and not finished: what a step copies out belongs to that step. The state hash after step n is
crc32(plan n | tokens and NaN flags of n | with debug_hash the bits of n's final hidden rows), chained from step n - 1: ranks that
ran the same plans and sampled the same tokens agree on it, and replaying a plan stream gives it again.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.geometry import Geometry
from engine.plan import ResultRow, StepPlan, StepResult
from engine.protocol import Logprobs
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch
from engine.rank.kv import KVCache
from engine.rank.parallel import Parallel
from engine.rank.sampler import Sampled, Sampler
from engine.rank.slots import SlotState, StepRows


class Model(Protocol):
    """What a runner asks of a model."""

    def forward(self, batch: ForwardBatch, cache: KVCache, attention: AttentionBackend) -> Tensor:
        """[R, hidden] of the batch's logit rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> fp32 [R, vocab / size], before the soft cap."""
        ...


class CopyOut:
    """Named device tensors on their way to the host, into memory of their own. On the CPU they are there already.

    Also marks the end of a step that gives nothing: a step is done when the device is done with it.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = {name: _copy_out(tensor) for name, tensor in tensors.items()}
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> dict[str, Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _copy_out(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Launched:
    """A step on its way; `finish` it once, in plan order. `rows` and `copy` are of the rows that sample."""

    plan: StepPlan
    rows: StepRows | None
    logprob_rows: Sequence[int]
    copy: CopyOut
    fold: Callable[[int, dict[str, Tensor]], None]

    @property
    def done(self) -> bool:
        """Whether `finish` would return at once."""
        return self.copy.done

    def finish(self) -> StepResult:
        """Wait for the step, fold it into the runner's state hash, and give its result."""
        host = self.copy.wait()
        self.fold(self.plan.step, host)
        return StepResult(self.plan.step, [] if self.rows is None else self._rows(self.rows, host))

    def _rows(self, rows: StepRows, host: dict[str, Tensor]) -> list[ResultRow]:
        logprobs = self._logprobs(rows, host)
        found = zip(rows.slots, rows.numbers, host["tokens"].tolist(), host["nan"].tolist(), strict=True)
        return [
            ResultRow(slot, number, () if nan else (token,), nan, None if nan else logprobs.get(row))
            for row, (slot, number, token, nan) in enumerate(found)
        ]

    def _logprobs(self, rows: StepRows, host: dict[str, Tensor]) -> dict[int, Logprobs]:
        if not self.logprob_rows:
            return {}
        lists = zip(self.logprob_rows, host["chosen"].tolist(), host["ids"].tolist(), host["values"].tolist(), strict=True)
        counts = rows.sampling.logprobs
        return {row: Logprobs(chosen, list(zip(ids, values, strict=True))[: counts[row]]) for row, chosen, ids, values in lists}


class Runner:
    """Runs plans on one rank; decides nothing. `state_hash` is the fold over the finished steps."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        parallel: Parallel,
        attention: AttentionBackend,
        config: EngineConfig,
        geometry: Geometry,
    ) -> None:
        device = next(iter(cache)).table.device
        self.state_hash = 0
        self.slots = SlotState(config.max_seqs, config.max_len, cache, device)
        self._device = device
        self._model = model
        self._cache = cache
        self._attention = attention
        self._sampler = Sampler(parallel, geometry.softcap, config.suppress, device)
        self._debug = config.debug_hash
        self._plans: deque[tuple[int, bytes]] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, data: bytes) -> Launched:
        """Start the step `plan`, whose bytes are `data`. At most two may be launched and not finished."""
        self._plans.append((plan.step, data))
        self.slots.apply(plan)
        if self._debug:
            self.slots.check()
        if not plan.tokens:
            return Launched(plan, None, (), CopyOut({}, self._device), self._fold)
        hidden = self._model.forward(self.slots.batch(plan), self._cache, self._attention)
        if not plan.result_slots:
            return Launched(plan, None, (), CopyOut({}, self._device), self._fold)
        rows = self.slots.rows(plan)
        sampled = self._sampler.sample(self._model.logits(hidden), rows.sampling)
        self.slots.store(rows, sampled.tokens)
        logprob_rows = sampled.logprobs.rows if sampled.logprobs else ()
        return Launched(plan, rows, logprob_rows, CopyOut(self._outputs(sampled, hidden), self._device), self._fold)

    def _outputs(self, sampled: Sampled, hidden: Tensor) -> dict[str, Tensor]:
        outputs = {"tokens": sampled.tokens, "nan": sampled.nan}
        if sampled.logprobs is not None:
            top = sampled.logprobs
            outputs |= {"chosen": top.chosen, "ids": top.ids, "values": top.values}
        if self._debug:
            outputs["hidden"] = hidden.contiguous()
        return outputs

    def _fold(self, step: int, host: dict[str, Tensor]) -> None:
        """Chain one finished step into the state hash."""
        expected, data = self._plans.popleft()
        assert step == expected, f"step {step} finished before step {expected}"
        state = zlib.crc32(data, self.state_hash)
        for name in ("tokens", "nan", "hidden"):
            if name in host:
                state = zlib.crc32(host[name].view(torch.uint8).numpy().tobytes(), state)
        self.state_hash = state
