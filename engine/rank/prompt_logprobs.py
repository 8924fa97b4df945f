"""Logprobs of a prompt's tokens: a row of a prefill chunk gives those of the token behind it, which is known.

A step's rows go through the head in pieces, so that no more than `PIECE_LOGITS` of a rank's logits exist at once: 64 rows of
262 144 on one rank, 256 on four. What leaves the device is a few numbers a token (`engine.protocol.PromptLogprobs`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.memory import PIECE_LOGITS
from engine.plan import PromptRow
from engine.protocol import PromptLogprobs
from engine.rank.batch import Chunk, ForwardBatch
from engine.rank.upload import uploaded


class PromptScoring(NamedTuple):
    """What a slot's sequence reports of its `prompt` tokens: the logprob of each but the first, beside so many alternatives.
    `number`: low 31 bits of its admission number."""

    number: int
    prompt: int
    alternatives: int


@dataclass(frozen=True)
class ScoredRows:
    """Rows [row, row + count) of a step's batch, of a slot from position `first` on."""

    slot: int
    scoring: PromptScoring
    row: int
    first: int
    count: int


def scored_rows(chunks: Sequence[Chunk], scorings: Mapping[int, PromptScoring]) -> list[ScoredRows]:
    """Returns the rows of a step's chunks that give logprobs of prompt tokens."""
    rows = []
    for chunk in chunks:
        if (scoring := scorings.get(chunk.slot)) is not None:
            count = min(chunk.end, scoring.prompt - 1) - chunk.start
            if count > 0:
                rows.append(ScoredRows(chunk.slot, scoring, chunk.offset, chunk.start, count))
    return rows


def token_logprobs(
    scored: Sequence[ScoredRows],
    batch: ForwardBatch,
    tokens: Tensor,
    report: Callable[[Tensor, Tensor, int], Tensor],
    share: int,
) -> Tensor:
    """Compute the logprobs int32 [n, 2 + 2 alternatives] of the tokens behind n scored rows, with as many alternatives as any of
    them asks for.

    tokens  int32 [slots, length]: those of the slots
    report  (rows int64 [r], ids int64 [r], alternatives) -> int32 [r, 2 + 2 alternatives]: logprobs of ids behind rows of the batch
    share   logits of a row
    """
    rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in scored])
    index = uploaded(torch.from_numpy(rows), tokens.device)
    ids = tokens[batch.slots[index].long(), batch.positions[index].long() + 1].long()
    most, size = max(part.scoring.alternatives for part in scored), max(1, PIECE_LOGITS // share)
    return torch.cat([report(*piece, most) for piece in zip(index.split(size), ids.split(size), strict=True)])


def prompt_rows(scored: Sequence[ScoredRows], words: np.ndarray) -> list[PromptRow]:
    """Cut what `token_logprobs` gave, int32 [n, 2 + 2 most] on the host, for each chunk with the alternatives that it asks for."""
    most, reports, first = words.shape[1] // 2 - 1, [], 0
    for part in scored:
        own, count = words[first : first + part.count], part.scoring.alternatives
        cut = np.concatenate([own[:, : 2 + count], own[:, 2 + most : 2 + most + count]], axis=1)
        reported = PromptLogprobs(part.first + 1, count, cut.astype("<i4", copy=False).tobytes())
        reports.append(PromptRow(part.slot, part.scoring.number, reported))
        first += part.count
    return reports
