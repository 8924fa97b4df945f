"""Adjusted logits by the formulas, of one sequence and over the whole vocabulary: what ranks, slices and tables are held to."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.logit_adjustments import LogitAdjustments


@dataclass(frozen=True)
class AdjustedSequence:
    """tokens, of which `prompt` are the prompt's; `allowed`: a grammar's mask of the next, bool [vocabulary]."""

    tokens: list[int]
    prompt: int
    wanted: LogitAdjustments = field(default_factory=LogitAdjustments)
    allowed: np.ndarray | None = None

    def longer(self, *tokens: int) -> "AdjustedSequence":
        return replace(self, tokens=[*self.tokens, *tokens])

    def logits(self, raw: Tensor, softcap: float) -> Tensor:
        """raw fp32 [vocabulary] -> fp64 [vocabulary]."""
        x = softcap * torch.tanh(raw.double() / softcap)
        for token, bias in self.wanted.bias:
            x[token] += bias
        generated = Counter(self.tokens[self.prompt :])
        for token in set(self.tokens):
            x[token] = x[token] / self.wanted.repetition_penalty if x[token] > 0 else x[token] * self.wanted.repetition_penalty
        for token, count in generated.items():
            x[token] -= self.wanted.presence_penalty + self.wanted.frequency_penalty * count
        if self.wanted.allowed_ids:
            x[np.setdiff1d(np.arange(len(x)), self.wanted.allowed_ids)] = -torch.inf
        if self.allowed is not None:
            x[torch.from_numpy(~self.allowed)] = -torch.inf
        for *others, last in self.wanted.bad_words:
            if not others or self.tokens[self.prompt :][-len(others) :] == others:
                x[last] = -torch.inf
        return x


def error(made: Tensor, right: Tensor) -> float:
    """The largest difference; infinite, or nearly, where only one is -inf or one is NaN."""
    if not torch.equal(made.isneginf(), right.isneginf()):
        return torch.inf
    return float((made - right).masked_fill(right.isneginf(), 0.0).abs().nan_to_num(torch.inf).max())


def random_sequence(generator: np.random.Generator, vocabulary: int, ids: int = 12) -> AdjustedSequence:
    """Any adjustments, or none, of a sequence over few of the ids, so that they matter."""
    known = generator.choice(vocabulary, ids, replace=False).tolist()
    tokens = generator.choice(known, generator.integers(2, 30)).tolist()
    prompt = int(generator.integers(1, len(tokens) + 1))
    some = lambda: generator.random() < 0.5  # noqa: E731
    words = [tuple(generator.choice(known, generator.integers(1, 4)).tolist()) for _ in range(5)]
    words += [(*tokens[-2:], known[0]), (tokens[-1], known[1])]
    biases = [-float("inf"), *generator.normal(size=ids - 1).astype(np.float32).tolist()]
    wanted = LogitAdjustments(
        repetition_penalty=float(np.float32(generator.uniform(0.7, 1.6))) if some() else 1.0,
        presence_penalty=float(np.float32(generator.uniform(-2, 2))) if some() else 0.0,
        frequency_penalty=float(np.float32(generator.uniform(-2, 2))) if some() else 0.0,
        bias=tuple(zip(known, biases, strict=True)) if some() else (),
        allowed_ids=tuple({*known, *generator.choice(vocabulary, 20).tolist()}) if some() else (),
        bad_words=tuple(words) if some() else (),
    )
    return AdjustedSequence(tokens, prompt, wanted, generator.random(vocabulary) < 0.4 if some() else None)
