"""Logprobs of a prompt's tokens: a row of a prefill chunk gives those of the token behind it, which is known.

What leaves the device is a few numbers a token (`engine.protocol.PromptLogprobs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.plan import PromptRow
from engine.protocol import PromptLogprobs
from engine.rank.batch import Chunk


class PromptScoring(NamedTuple):
    """What a slot's sequence reports of its `prompt` tokens: the logprob of each but the first, beside so many alternatives.
    `number`: low 31 bits of its admission number."""

    number: int
    prompt: int
    alternatives: int


@dataclass(frozen=True)
class ScoredRows:
    """The first `count` rows of a step's chunk, which give logprobs of the tokens behind them."""

    chunk: Chunk
    scoring: PromptScoring
    count: int


def scored_rows(chunks: Sequence[Chunk], scorings: Mapping[int, PromptScoring]) -> list[ScoredRows]:
    """Returns the rows of a step's chunks that give logprobs of prompt tokens."""
    rows = []
    for chunk in chunks:
        if (scoring := scorings.get(chunk.slot)) is not None:
            count = min(chunk.end, scoring.prompt - 1) - chunk.start
            if count > 0:
                rows.append(ScoredRows(chunk, scoring, count))
    return rows


def prompt_rows(scored: Sequence[ScoredRows], words: np.ndarray) -> list[PromptRow]:
    """Cut what `SampleStage.prompt_logprobs` gave, int32 [n, 2 + 2 most] on the host, for each chunk with the alternatives that it
    asks for."""
    most, reports, first = words.shape[1] // 2 - 1, [], 0
    for part in scored:
        own, count = words[first : first + part.count], part.scoring.alternatives
        cut = np.concatenate([own[:, : 2 + count], own[:, 2 + most : 2 + most + count]], axis=1)
        reported = PromptLogprobs(part.chunk.start + 1, count, cut.astype("<i4", copy=False).tobytes())
        reports.append(PromptRow(part.chunk.slot, part.scoring.number, reported))
        first += part.count
    return reports
