"""What a request says about its logits beyond temperature and filters.

`kernels.adjust` has the formulas and their order.
"""

import msgspec

MAX_BIAS_IDS = 1024  # of one request: a rank's tables have fixed widths
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 1024  # of all its bad words together


class LogitAdjustments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adjustments of one request; the defaults change nothing.

    repetition_penalty                   of ids that the prompt has or that were generated: 1 is none
    presence_penalty, frequency_penalty  of ids that were generated
    bias         (id, what is added to its logit), each id once; -inf forbids the id
    allowed_ids  the only ids that may come; empty: all may
    bad_words    token ids of words that may not be generated; none is empty
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The penalties of repetition, presence and frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    def excess(self) -> str | None:
        """What is more than the ranks' tables hold, in a sentence; None: it fits."""
        counts = {
            "biased ids": (len(self.bias), MAX_BIAS_IDS),
            "allowed ids": (len(self.allowed_ids), MAX_ALLOWED_IDS),
            "bad words": (len(self.bad_words), MAX_BAD_WORDS),
            "token ids of bad words": (sum(map(len, self.bad_words)), MAX_BAD_WORD_IDS),
        }
        over = (f"{count} {what}; at most {most} are possible" for what, (count, most) in counts.items() if count > most)
        return next(over, None)
