"""Reports a step: an asynchronous copy of its outputs, its result's bytes, the state hash."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.channel import checksum
from engine.plan import RESULT_HEAD, ROW_EMPTY, ROW_NAN, encode_rows
from engine.protocol import Logprobs, PromptLogprobs
from engine.rank.page_check import PageCheck
from engine.rank.prompt_logprobs import ScoredRows, prompt_rows
from engine.rank.sampler import ResultRows
from engine.rank.stages.encode_stage import EncodeStage
from engine.rank.stages.forward_stage import Forwarded
from engine.rank.stages.sample_stage import StepTokens
from engine.rank.step_clock import DeviceEvent, elapsed_us, record_event
from engine.rank.upload import downloaded, staging
from kernels.choose import ROW_ERROR, ROW_HAS_NAN, ROW_NO_TOKEN


@dataclass(frozen=True)
class Launched:
    """Call `result`, then `fold`, each once and in plan order."""

    step: int
    hashed: tuple[bytes, bytes]  # the bytes of its plan and its masks
    rows: ResultRows  # that sample
    scored: Sequence[ScoredRows]  # that give prompt logprobs
    copies: dict[str, Tensor]  # outputs on the host, by name, valid once `end` has come
    before: DeviceEvent | None  # the end of the previous step; None: it tells nothing of idle time
    start: DeviceEvent  # by `step_clock`
    end: DeviceEvent
    stage: "ReportStage"

    @property
    def done(self) -> bool:
        return self.end.query()

    @property
    def busy_us(self) -> int:
        return elapsed_us(self.start, self.end)

    @property
    def idle_us(self) -> int:
        """Device idle time before the step; 0 if unknown."""
        if self.before is None:
            return 0
        return elapsed_us(self.before, self.start)

    def outputs(self) -> dict[str, np.ndarray]:
        """Waits for the step."""
        self.end.synchronize()
        return {name: tensor.numpy() for name, tensor in self.copies.items()}

    def result(self) -> bytes:
        """Wait for the step; its StepResult's bytes. RuntimeError: a peer's part of a sum did not come. PageViolation
        (`debug_pages`)."""
        host = self.outputs()
        pages = self.stage.pages
        ended = self.stage.encodes.ended
        if pages is not None:
            pages.verify(self.step, host["violations"])
        tokens, flags = host["chosen"].T
        if (flags & ROW_ERROR).any():
            raise RuntimeError(f"step {self.step}: another rank's part of an all-reduce did not come in time")
        rows = self.rows
        width = self.rows.width
        first = flags[::width]
        table = np.empty((len(first), RESULT_HEAD + width), np.int32)
        nan, empty = ((first & flag) != 0 for flag in (ROW_HAS_NAN, ROW_NO_TOKEN))
        accepted = host["accepted"] if width > 1 else 1
        table[:, 0], table[:, 1] = rows.slots[::width], rows.numbers[::width]
        table[:, 2], table[:, 3] = accepted * ~(nan | empty), ROW_NAN * nan + ROW_EMPTY * empty
        table[:, RESULT_HEAD:] = tokens.reshape(-1, width)
        if "drafts" in host:
            table = np.concatenate([table, host["drafts"]], axis=1)
        prompts = prompt_rows(self.scored, host["prompts"]) if self.scored else ()
        return encode_rows(self.step, table, self._logprobs(rows, host, table[:, 2]), prompts, ended)

    def fold(self) -> None:
        """Add this step to the state hash: a chained checksum of (plan | masks | tokens and flags | with debug_hash the last
        hidden rows), equal on all ranks and in a replay."""
        host = self.outputs()
        value = self.stage.state_hash
        for given in self.hashed:
            value = checksum(given, value)
        for name in ("chosen", "hidden"):
            if name in host:
                value = zlib.crc32(host[name].tobytes(), value)
        self.stage.state_hash = value

    def finish(self) -> bytes:
        result = self.result()
        self.fold()
        return result

    def _logprobs(self, rows: ResultRows, host: dict[str, np.ndarray], counts: np.ndarray) -> dict[int, list[Logprobs]]:
        if not rows.reported:
            return {}
        reported = defaultdict[int, list[Logprobs]](list)
        words = PromptLogprobs(0, rows.alternatives, host["logprobs"].astype("<i4", copy=False).tobytes())
        for row, (_, one) in zip(rows.reported, words.entries(), strict=True):
            sequence, token = divmod(row, rows.width)
            if token < counts[sequence]:
                reported[sequence].append(Logprobs(one.chosen, one.top[: rows.logprobs[row]]))
        return reported


class ReportStage:
    def __init__(
        self, rows: int, device: torch.device, pages: PageCheck | None, encodes: EncodeStage, *, debug_hash: bool
    ) -> None:
        self._device = device
        self.pages = pages
        self.encodes = encodes
        self.debug_hash = debug_hash
        self.state_hash = 0
        self._host = staging(device, rows, 2)
        self.last_end: DeviceEvent | None = None  # of the step started last

    def start(self, step: Forwarded, rows: ResultRows, sampled: StepTokens, masks: bytes) -> Launched:
        pinned = {"chosen": next(self._host)[: len(rows.slots)]}  # other outputs get new memory
        outputs = self._outputs(step, rows, sampled)
        copies = {name: downloaded(output, pinned.get(name)) for name, output in outputs.items()}
        before = self.last_end if len(step.plan.rows) else None
        end = record_event(self._device)
        self.last_end = end
        return Launched(step.plan.step, (step.data, masks), rows, step.scored, copies, before, step.start, end, self)

    def _outputs(self, step: Forwarded, rows: ResultRows, sampled: StepTokens) -> dict[str, Tensor]:
        count = len(rows.slots)
        outputs: dict[str, Tensor | None] = {
            "violations": None if self.pages is None else self.pages.violations,
            "chosen": sampled.chosen[:count],
            "accepted": None if sampled.accepted is None else sampled.accepted[: count // rows.width],
            "hidden": step.hidden[:count].contiguous().view(torch.uint8) if self.debug_hash else None,
            "drafts": sampled.drafts,
            "logprobs": sampled.logprobs,
            "prompts": step.prompts,
        }
        return {name: output for name, output in outputs.items() if output is not None}
