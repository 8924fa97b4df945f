"""The forward of a step: the plan applied to the device's tables, the step's batch, the model.

Plans are padded to buckets; the host decides nothing of them, so that a graph can hold them. A plan with many prompt tokens, or
that reports logprobs of them (`ForwardStage.eager`), runs as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from engine.plan import PlanView
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import Chunk, ForwardBatch, SoftTokens, last_seen_of
from engine.rank.models.architecture import Model
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes, inboxes_of
from engine.rank.products import Peers
from engine.rank.prompt_logprobs import PromptScoring, ScoredRows, scored_rows
from engine.rank.stages.encode_stage import EncodeStage
from engine.rank.step import StepBuffers, StepSizes, chunks_of


class ScoredBatch(NamedTuple):
    """Rows of a whole batch that give logprobs of prompt tokens, and the final hidden rows [rows, hidden] of all of it."""

    scored: Sequence[ScoredRows]
    batch: ForwardBatch
    hidden: Tensor


class MediaRows(NamedTuple):
    """Fixed addresses of what padded steps have of media: `SoftTokens` of so many rows, and `ForwardBatch.last_seen`."""

    rows: Tensor
    values: Tensor
    last_seen: Tensor


class FinalRows(NamedTuple):
    """The output of a forward: hidden [rows, hidden] of the rows that sample, padded as the forward was.

    batch     slots and positions of those rows; None: the step has no rows
    captured  the sizes of its graph, if it was one;   prompts  rows whose prompts' logprobs are wanted
    """

    hidden: Tensor
    batch: ForwardBatch | None = None
    captured: StepSizes | None = None
    prompts: ScoredBatch | None = None


@dataclass
class ForwardStage:
    """Runs the model over a step's rows.

    inboxes      the group's; None: sums over ranks are collectives
    media        of padded steps; None: there are no encoders
    """

    model: Model
    attention: AttentionBackend
    inputs: StepBuffers
    inboxes: Inboxes | None
    pages: PageCheck | None
    media: MediaRows | None

    def set_media(self, soft: SoftTokens | None, chunks: Sequence[Chunk]) -> None:
        """Set the soft tokens of the next padded step, None if it has none, and what rows of its chunks see."""
        assert self.media is not None
        rows, values, last_seen = self.media
        rows.fill_(-1)
        if soft is not None:
            rows[: len(soft.rows)], values[: len(soft.rows)] = soft.rows, soft.values
        last_seen.fill_(-1)
        if (seen := last_seen_of(chunks, rows.device)) is not None:
            last_seen[: len(seen)] = seen

    def padded(self, sizes: StepSizes, width: int) -> tuple[ForwardBatch, Tensor]:
        """Returns inputs and final hidden rows of the uploaded plan's result rows, padded to `sizes`, with decode rows of `width`
        tokens. Capturable."""
        batch, ends = self._inputs_of(sizes, width)
        if self.media is not None and sizes.prompts:
            rows, values, last_seen = (part[: sizes.prompts] for part in self.media)
            batch = replace(batch, soft=SoftTokens(rows, values), last_seen=last_seen)
        return ends, self.run(batch)

    def _inputs_of(self, sizes: StepSizes, width: int) -> tuple[ForwardBatch, ForwardBatch]:
        """Apply the uploaded plan; returns its rows, and those that give results."""
        self.inputs.apply()
        batch, ends = self.inputs.batch(sizes, width)
        if self.pages is not None:
            self.pages.check(batch)
        return batch, ends

    def eager(
        self,
        plan: PlanView,
        scorings: Mapping[int, PromptScoring],
        width: int,
        media: EncodeStage,
    ) -> FinalRows:
        """Run the forward of the uploaded plan unpadded: with chunks, and decode rows of `width` tokens, or with no rows at all.

        scorings: of slots that report logprobs of their prompts; media: has the soft tokens.
        """
        if not len(plan.chunks):
            self.inputs.apply()
            return FinalRows(self.inputs.plan[:0])
        chunks = chunks_of(plan)
        batch, ends = self._inputs_of(StepSizes.of(plan), width)
        batch = replace(batch, chunks=chunks, soft=media.soft_tokens(chunks))
        if not (scored := scored_rows(batch.chunks, scorings)):
            return FinalRows(self.run(batch), ends)
        hidden = self.run(replace(batch, logit_rows=None))
        return FinalRows(hidden[batch.logit_rows], ends, prompts=ScoredBatch(scored, batch, hidden))

    def run(self, batch: ForwardBatch) -> Tensor:
        """Returns the final hidden rows of `batch.logit_rows`, in a buffer that the next forward may write."""
        peers: Peers = inboxes_of(self.inboxes, batch.rows)[0]
        if peers is None and self.inboxes is not None and (sequence := self.inboxes.sequence) is not None:
            least = sequence.rows.start * (sequence.size if batch.chunks else 1)  # not captured: with fewer the host is the bound
            peers = sequence.begin(batch.rows) if least <= batch.rows < sequence.rows.stop else None
        return self.model.states(batch, self.attention, peers)[1]
