"""The forward of a step: the plan applied to the device's tables, the step's batch, the model.

Plans are padded to `engine.step_shapes`; the host decides nothing of them, so that a graph can hold them. A plan with many prompt
tokens, or that reports logprobs of them (`ForwardStage.eager`), runs as it is.
"""

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
from engine.step_media import MediaReader
from engine.step_shapes import StepSizes


@dataclass
class Forwarded:
    """A step whose forward was launched, for `Runner.sample`.

    data     the plan's bytes;   start  the step's start event
    media    has the items whose encode is still to begin; None: it has begun, or the plan has none
    hidden   final hidden rows [rows, hidden] of the rows that sample, padded as the forward was
    batch    slots and positions of those rows; None: the step has no rows;   captured  the sizes of its graph, if it was one
    scored   rows that give logprobs of prompt tokens;   prompts  those, int32 [n, 2 + 2 alternatives]
    """

    plan: PlanView
    data: bytes
    start: DeviceEvent
    media: MediaReader | None
    hidden: Tensor
    batch: ForwardBatch | None = None
    captured: StepSizes | None = None
    scored: Sequence[ScoredRows] = ()
    prompts: Tensor | None = None


@dataclass
class ForwardStage:
    """Runs the model over a step's rows. inboxes: the group's; None: sums over ranks are collectives."""

    model: Model
    attention: AttentionBackend
    inputs: StepBuffers
    inboxes: Inboxes | None
    pages: PageCheck | None

    def padded(self, sizes: StepSizes, *, adapted: bool = False) -> tuple[ForwardBatch, Tensor]:
        """Returns inputs and final hidden rows of the uploaded plan's result rows, padded to `sizes`. adapted: some rows have
        adapters. Capturable."""
        batch, ends = self._inputs_of(sizes, adapted=adapted)
        return ends, self.run(self.inputs.with_media(batch))

    def padded_into(self, sizes: StepSizes, state: tuple[ForwardBatch, Tensor]) -> tuple[ForwardBatch, Tensor]:
        """Run the forward of rows with adapters; its result takes the place of that of `padded` without, `state`, which stages
        after it were captured with. Capturable."""
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
        """Run the forward of the uploaded plan, which has chunks, unpadded. Returns all its rows, those that give results, and
        final hidden rows: of those, or of all rows where they are not `narrowed`."""
        batch, ends = self._inputs_of(sizes, adapted=adapted)
        batch = replace(batch, chunks=chunks, soft=soft)
        return batch, ends, self.run(batch if narrowed else replace(batch, logit_rows=None))

    def _inputs_of(self, sizes: StepSizes, *, adapted: bool) -> tuple[ForwardBatch, ForwardBatch]:
        """Apply the uploaded plan; returns its rows, and those that give results."""
        self.inputs.apply()
        batch, ends = self.inputs.batch(sizes)
        if self.pages is not None:
            self.pages.check(batch)
        if adapted:
            batch = self.inputs.with_adapters(batch)
        return batch, ends

    def run(self, batch: ForwardBatch) -> Tensor:
        """Returns the final hidden rows of `batch.logit_rows`, in a buffer that the next forward may write."""
        peers: Peers = inboxes_of(self.inboxes, batch.rows)[0]
        if peers is None and self.inboxes is not None and (sequence := self.inboxes.sequence) is not None:
            least = sequence.rows.start * (sequence.size if batch.chunks else 1)  # not captured: with fewer the host is the bound
            peers = sequence.begin(batch.rows) if least <= batch.rows < sequence.rows.stop else None
        return self.model.states(batch, self.attention, peers)[1]
