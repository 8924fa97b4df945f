"""Answers held to a reference, or to each other: token by token, logprob by logprob, with the one excuse of an exact tie.

every token      is the reference's argmax at its place, given the answer's own tokens before it (teacher forcing)
a difference     is a tie where the reference's logits of both tokens lie within TIE: counted, and the rest is not judged; else
                 it is wrong: counted, and judged on
every logprob    of the token and of the alternatives, and of the prompt's tokens where there are some, against the reference's
                 log-softmax of the soft-capped logits; the values of the alternatives also against the reference's own best, so
                 that none may be left out
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import Logprobs, SamplingParams
from kernels.sample import gumbel
from tests.support.engine.drive import Answer
from tests.support.judge.oracle import Verdict

TIE = 1e-4


@dataclass(frozen=True)
class Match:
    """How many tokens were judged, and what came of it; `skipped` lie behind a tie or a router's near tie. Matches add up.

    worst    largest absolute difference of a logprob; infinite when one was not finite
    off, of  sums of |difference| and of |reference| over all logprobs
    """

    judged: int = 0
    same: int = 0
    wrong: int = 0
    ties: int = 0
    skipped: int = 0
    worst: float = 0.0
    off: float = 0.0
    of: float = 0.0

    def __add__(self, other: "Match") -> "Match":
        return Match(
            self.judged + other.judged,
            self.same + other.same,
            self.wrong + other.wrong,
            self.ties + other.ties,
            self.skipped + other.skipped,
            max(self.worst, other.worst),
            self.off + other.off,
            self.of + other.of,
        )

    @property
    def relative(self) -> float:
        """Mean difference, relative to the mean size of a logprob."""
        return self.off / self.of if self.of else 0.0

    def __str__(self) -> str:
        rate = self.same / self.judged if self.judged else 0.0
        return (
            f"{self.judged} tokens judged, match rate {rate:.6f} ({self.wrong} wrong, {self.ties} ties), "
            f"logprob difference: largest {self.worst:.1e}, mean relative {self.relative:.1e}; {self.skipped} not judged"
        )


def compare(prompt: list[int], answer: Answer, verdict: Verdict, tie: float = TIE) -> Match:
    """`verdict` is the reference's of prompt + answer.tokens; each token needs its logprobs, those of the prompt need none."""
    count, first = len(answer.tokens), len(prompt) - 1
    assert count == len(answer.logprobs) > 0, (count, len(answer.logprobs))
    sure = max(0, min(count, verdict.sure - first))
    logits = verdict.logits[first : first + sure]
    tokens = torch.tensor(answer.tokens[:sure])
    gaps = logits.amax(-1) - logits.gather(1, tokens[:, None]).squeeze(1)
    tied = ((gaps > 0) & (gaps <= tie)).nonzero()
    ties = min(1, len(tied))
    judged = int(tied[0]) if ties else sure  # the tie itself is counted, and neither right nor wrong
    same = int((gaps[:judged] == 0).sum())
    worst, off, of = _differences(logits[: judged + ties], answer.logprobs, tokens)
    generated = Match(judged + ties, same, judged - same, ties, count - judged - ties, worst, off, of)
    return generated + compare_prompt(prompt, answer, verdict, tie) if answer.prompt else generated


def compare_prompt(prompt: list[int], answer: Answer, verdict: Verdict, tie: float = TIE) -> Match:
    """X and ranks the answer has: no token is judged, and a wrong rank is off without bounds."""
    assert len(answer.prompt) == len(prompt) - 1, (len(answer.prompt), len(prompt))
    told = answer.prompt[: verdict.sure]
    logits, tokens = verdict.logits[: len(told)], torch.tensor(prompt[1 : 1 + len(told)])
    worst, off, of = _differences(logits, [logprobs for _, logprobs in told], tokens)
    own, ranks = logits.gather(1, tokens[:, None]), torch.tensor([rank for rank, _ in told])
    least, most = ((logits >= own + by).sum(-1) for by in (tie, -tie))
    right = bool(((least <= ranks) & (ranks <= most)).all())
    return Match(worst=worst if right else math.inf, off=off, of=of)


def _differences(logits: Tensor, logprobs: list[Logprobs], tokens: Tensor) -> tuple[float, float, float]:
    """(largest, sum of absolute differences, sum of absolute reference values) over all reported logprobs."""
    if not len(logits):
        return 0.0, 0.0, 0.0
    right = logits.double().log_softmax(-1)
    told = logprobs[: len(logits)]
    ids = torch.tensor([[token for token, _ in each.top] for each in told])
    top = torch.tensor([[value for _, value in each.top] for each in told], dtype=torch.float64)
    chosen = torch.tensor([each.chosen for each in told], dtype=torch.float64)
    theirs = torch.cat([right.gather(1, tokens[: len(logits), None]), right.gather(1, ids)], dim=1)
    ours = torch.cat([chosen[:, None], top], dim=1)
    apart = (ours - theirs).abs().nan_to_num(math.inf)
    missed = (top - right.topk(top.shape[1], dim=-1).values).abs().nan_to_num(math.inf)
    return max(apart.max().item(), missed.max().item()), apart.sum().item(), theirs.abs().sum().item()


@dataclass(frozen=True)
class Twins:
    """The same request served twice.

    same   equal tokens, or equal up to an exact tie
    gap    at the first difference, how far apart the second answer's scores of both tokens lie; None: the tokens are equal
    worst  largest difference of a token's logprob up to there, of those that both report
    """

    same: bool
    gap: float | None
    worst: float


def twins(prompt: int, params: SamplingParams, one: Answer, other: Answer, tie: float = TIE) -> Twins:
    """`other` must report all logprobs for a difference to count as a tie. `prompt` in tokens, `params` those of `other`."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), None)
    apart = [abs(a.chosen - b.chosen) for a, b in zip(one.logprobs, other.logprobs, strict=False)][:at]
    if at is None:
        return Twins(one.tokens == other.tokens and one.end == other.end, None, max(apart, default=0.0))
    known = dict(other.logprobs[at].top) if other.logprobs else {}
    if one.logprobs:
        apart.append(abs(one.logprobs[at].chosen - known.get(one.tokens[at], math.inf)))
    first, second = (_score(known, token, prompt + at, params) for token in (one.tokens[at], other.tokens[at]))
    gap = second - first  # nobody else scored higher: at a tie it is next to nothing
    return Twins(abs(gap) <= tie, gap, max(apart, default=0.0))


def _score(known: dict[int, float], token: int, position: int, params: SamplingParams) -> float:
    """What the sampler takes the largest of: the logprob, or scaled and with its noise; -inf where not reported."""
    if token not in known or params.temperature <= 0:
        return known.get(token, -math.inf)
    noise = gumbel(torch.tensor([params.seed]), torch.tensor([position]), torch.tensor([token])).item()
    return known[token] / params.temperature + noise
