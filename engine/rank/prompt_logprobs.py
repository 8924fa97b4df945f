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
from engine.plan import Admission, PromptRow
from engine.protocol import PromptLogprobs
from engine.rank.batch import Chunk, ForwardBatch
from engine.rank.upload import uploaded


class WantedLogprobs(NamedTuple):
    """Of a slot: logprobs of the prompt's tokens at positions first + 1 .. prompt - 1, each beside so many alternatives."""

    number: int
    first: int
    prompt: int
    alternatives: int

    @classmethod
    def by(cls, admission: Admission, number: int) -> "WantedLogprobs | None":
        """What is left of them for an admission; None: nothing."""
        alternatives = admission.params.prompt_logprobs
        if alternatives is None or admission.scored >= admission.prompt - 1:
            return None
        return cls(number, admission.scored, admission.prompt, alternatives)


@dataclass(frozen=True)
class ScoredRows:
    """Rows [row, row + count) of a step's batch, of a slot from position `first` on."""

    slot: int
    wanted: WantedLogprobs
    row: int
    first: int
    count: int


def scored_rows(chunks: Sequence[Chunk], wanted: Mapping[int, WantedLogprobs]) -> list[ScoredRows]:
    """Which rows of a step's chunks give logprobs of prompt tokens."""
    found = []
    for chunk in chunks:
        if (asked := wanted.get(chunk.slot)) is not None:
            first, end = max(chunk.start, asked.first), min(chunk.end, asked.prompt - 1)
            if first < end:
                found.append(ScoredRows(chunk.slot, asked, chunk.offset + first - chunk.start, first, end - first))
    return found


def token_logprobs(
    scored: Sequence[ScoredRows],
    batch: ForwardBatch,
    tokens: Tensor,
    report: Callable[[Tensor, Tensor, int], Tensor],
    share: int,
) -> Tensor:
    """int32 [n, 2 + 2 alternatives] of the tokens behind n scored rows, with as many alternatives as any of them asks for.

    tokens  int32 [slots, length]: those of the slots
    report  (rows int64 [r], ids int64 [r], alternatives) -> int32 [r, 2 + 2 alternatives]: logprobs of ids behind rows of the batch
    share   logits of a row
    """
    rows = np.concatenate([np.arange(each.row, each.row + each.count) for each in scored])
    index = uploaded(torch.from_numpy(rows), tokens.device)
    ids = tokens[batch.slots[index].long(), batch.positions[index].long() + 1].long()
    most, size = max(each.wanted.alternatives for each in scored), max(1, PIECE_LOGITS // share)
    return torch.cat([report(*piece, most) for piece in zip(index.split(size), ids.split(size), strict=True)])


def prompt_rows(scored: Sequence[ScoredRows], words: np.ndarray) -> list[PromptRow]:
    """What `token_logprobs` gave, int32 [n, 2 + 2 most] on the host, for each chunk with the alternatives that it asks for."""
    most, found, at = words.shape[1] // 2 - 1, [], 0
    for each in scored:
        mine, count = words[at : at + each.count], each.wanted.alternatives
        cut = np.concatenate([mine[:, : 2 + count], mine[:, 2 + most : 2 + most + count]], axis=1)
        reported = PromptLogprobs(each.first + 1, count, cut.astype("<i4", copy=False).tobytes())
        found.append(PromptRow(each.slot, each.wanted.number, reported))
        at += each.count
    return found
