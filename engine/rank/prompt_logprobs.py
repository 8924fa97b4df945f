"""Logprobs of prompt tokens: a row of a prefill chunk gives those of the next token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.plan import PromptRow
from engine.protocol import PromptLogprobs
from engine.rank.batch import Chunk


class PromptScoring(NamedTuple):
    """`number`: low 31 bits of the admission number."""

    number: int
    prompt: int
    alternatives: int


@dataclass(frozen=True)
class ScoredRows:
    """The first `count` rows of a chunk."""

    chunk: Chunk
    scoring: PromptScoring
    count: int


def scored_rows(chunks: Sequence[Chunk], scorings: Mapping[int, PromptScoring]) -> list[ScoredRows]:
    rows = []
    for chunk in chunks:
        if (scoring := scorings.get(chunk.slot)) is not None:
            count = min(chunk.end, scoring.prompt - 1) - chunk.start
            if count > 0:
                rows.append(ScoredRows(chunk, scoring, count))
    return rows


def prompt_rows(scored: Sequence[ScoredRows], words: np.ndarray) -> list[PromptRow]:
    most = words.shape[1] // 2 - 1
    reports = []
    first = 0
    for part in scored:
        own = words[first : first + part.count]
        count = part.scoring.alternatives
        cut = np.concatenate([own[:, : 2 + count], own[:, 2 + most : 2 + most + count]], axis=1)
        reported = PromptLogprobs(part.chunk.start + 1, count, cut.astype("<i4", copy=False).tobytes())
        reports.append(PromptRow(part.chunk.slot, part.scoring.number, reported))
        first += part.count
    return reports
