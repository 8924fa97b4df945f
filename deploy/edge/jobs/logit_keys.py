"""A request's penalties, logit_bias, bad_words and allowed_token_ids for the engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from deploy.edge.bodies.raw_json import invalid
from deploy.edge.requests.ask import Sampling
from engine.logit_adjustments import MAX_BIAS_IDS, LogitAdjustments

Ids = TypeVar("Ids", bound=Iterable[int])
BAN = -100  # of a logit_bias: OpenAI's "should result in a ban"


def logit_adjustments(
    sampling: Sampling, vocab: int, encode: Callable[[str], list[int]], banned: Iterable[int]
) -> LogitAdjustments | None:
    """None without adjustments. InvalidRequest names the key."""
    biases = {**sampling.biases, **dict.fromkeys(banned, BAN)}
    allowed = sampling.allowed_ids
    check_ids(biases, vocab, "logit_bias")
    check_ids(allowed or [], vocab, "allowed_token_ids")
    if allowed is not None and not allowed:
        raise invalid("allowed_token_ids", "must name at least one id")
    if allowed and all(biases.get(token) == BAN for token in allowed):
        raise invalid("allowed_token_ids", "logit_bias forbids all of them")
    adjusted = LogitAdjustments(
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias=tuple((token, -float("inf") if value == BAN else value) for token, value in biases.items()),
        allowed_ids=tuple(dict.fromkeys(allowed or ())),
        bad_words=_spellings(sampling.bad_words, encode),
    )
    if (excess := adjusted.excess()) is not None:
        if len(biases) > MAX_BIAS_IDS:
            raise invalid("logit_bias", f"{excess}, those that tool_choice none forbids among them")
        raise invalid("bad_words", excess)  # other lists are bounded where they are read
    if adjusted != LogitAdjustments():
        return adjusted
    return None


def _spellings(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """At the start of a text, and after a space."""
    if not all(word.strip() for word in words):
        raise invalid("bad_words", "a word must not be empty")
    return tuple(dict.fromkeys(tuple(encode(prefix + word.lstrip())) for word in words for prefix in ("", " ")))


def check_ids(ids: Ids, vocab: int, param: str) -> Ids:
    if (largest := max(ids, default=0)) >= vocab:
        raise invalid(param, f"token id {largest} is outside the vocabulary of {vocab}")
    return ids
