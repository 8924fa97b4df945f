"""Logit adjustments of a request. `kernels.adjust` has formulas and order."""

import msgspec

MAX_BIAS_IDS = 1024  # of one request: a rank's tables have fixed widths
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 1024  # of all its bad words together


class LogitAdjustments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults change nothing. Presence and frequency are of generated ids."""

    repetition_penalty: float = 1.0  # of ids in the prompt or generated: 1 changes nothing
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit), each id once; -inf forbids the id
    allowed_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of forbidden words, none empty

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    def excess(self) -> str | None:
        """What exceeds the ranks' tables, in a sentence."""
        counts = {
            "biased ids": (len(self.bias), MAX_BIAS_IDS),
            "allowed ids": (len(self.allowed_ids), MAX_ALLOWED_IDS),
            "bad words": (len(self.bad_words), MAX_BAD_WORDS),
            "token ids of bad words": (sum(map(len, self.bad_words)), MAX_BAD_WORD_IDS),
        }
        over = (f"{count} {what}; at most {most} are possible" for what, (count, most) in counts.items() if count > most)
        return next(over, None)
