"""The forward of a step: apply the plan, make the batch, run the model, padded or (`eager`)
unpadded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.plan import PlanView
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import Chunk, ForwardBatch, SoftTokens
from engine.rank.models.architecture import Model
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes, inboxes_of
from engine.rank.products import Peers
from engine.rank.prompt_logprobs import ScoredRows
from engine.rank.step import StepBuffers
from engine.rank.step_clock import DeviceEvent
from engine.step_shapes import StepSizes


@dataclass
class Forwarded:
    plan: PlanView
    data: bytes
    start: DeviceEvent
    encodes_begun: bool
    hidden: Tensor  # final hidden rows [rows, hidden] of the rows that sample, padded as the forward
    batch: ForwardBatch | None = None  # slots and positions of those rows, or None
    captured: StepSizes | None = None  # the sizes of its graph, or None
    scored: Sequence[ScoredRows] = ()  # rows with prompt logprobs
    prompts: Tensor | None = None  # those, int32 [n, 2 + 2 alternatives]


@dataclass
class ForwardStage:
    """Without inboxes sums over ranks are collectives."""

    model: Model
    attention: AttentionBackend
    inputs: StepBuffers
    inboxes: Inboxes | None
    pages: PageCheck | None

    def padded(self, sizes: StepSizes, *, adapted: bool = False) -> tuple[ForwardBatch, Tensor]:
        """Result rows of the uploaded plan and their final hidden rows, padded to `sizes`. Capturable."""
        batch, ends = self._inputs_of(sizes, adapted=adapted)
        return ends, self.run(self.inputs.with_media(batch))

    def padded_into(self, sizes: StepSizes, state: tuple[ForwardBatch, Tensor]) -> tuple[ForwardBatch, Tensor]:
        """The forward with adapters, written into `state`, which later stages were captured to read. Capturable."""
        _, hidden = self.padded(sizes, adapted=True)
        state[1].copy_(hidden)
        return state

    def eager(
        self,
        sizes: StepSizes,
        chunks: tuple[Chunk, ...],
        soft: SoftTokens | None,
        *,
        narrowed: bool = True,
        adapted: bool = False,
    ) -> tuple[ForwardBatch, ForwardBatch, Tensor]:
        """Run the uploaded plan unpadded. Returns all its rows, the result rows, and final hidden
        rows: of those, or of all unless `narrowed`."""
        batch, ends = self._inputs_of(sizes, adapted=adapted)
        batch = replace(batch, chunks=chunks, soft=soft)
        return batch, ends, self.run(batch if narrowed else replace(batch, logit_rows=None))

    def _inputs_of(self, sizes: StepSizes, *, adapted: bool) -> tuple[ForwardBatch, ForwardBatch]:
        self.inputs.apply()
        batch, ends = self.inputs.batch(sizes)
        if self.pages is not None:
            self.pages.check(batch)
        if adapted:
            batch = self.inputs.with_adapters(batch)
        return batch, ends

    def run(self, batch: ForwardBatch) -> Tensor:
        """Final hidden rows of `batch.logit_rows`, in a buffer that the next forward may overwrite."""
        peers: Peers = inboxes_of(self.inboxes, batch.rows)[0]
        if peers is None and self.inboxes is not None and (sequence := self.inboxes.sequence) is not None:
            least = sequence.rows.start * (sequence.size if batch.chunks else 1)  # not captured: with fewer the host is the bound
            peers = sequence.begin(batch.rows) if least <= batch.rows < sequence.rows.stop else None
        return self.model.states(batch, self.attention, peers)[1]
