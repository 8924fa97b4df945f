"""What a request says about its logits beyond temperature and filters, and its bytes in a plan's admission.

`kernels.adjust` has the formulas and their order.
"""

import struct
from itertools import chain, islice

import msgspec

MAX_BIAS_IDS = 1024  # of one request: a rank's tables have fixed widths
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 1024  # of all its bad words together

_HEAD = struct.Struct("<fff4i")  # the penalties; counts of biases, allowed ids, bad words, ids of all bad words


class LogitAdjustments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one request; the defaults change nothing.

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
        """Of repetition, presence, frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def penalizes(self) -> bool:
        """Whether any penalty changes logits."""
        return self.penalties != (1.0, 0.0, 0.0)

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


MAX_SIZE = _HEAD.size // 4 + 2 * MAX_BIAS_IDS + MAX_ALLOWED_IDS + MAX_BAD_WORDS + MAX_BAD_WORD_IDS


def encoded_size(adjustments: LogitAdjustments | None) -> int:
    """Numbers of four bytes that `encode` makes of it; none of None."""
    return 0 if adjustments is None else len(encode(adjustments)) // 4


def encode(adjustments: LogitAdjustments) -> bytes:
    """head | biased ids | biases fp32 | allowed ids | ids of each bad word, how many | their ids; `decode` is the inverse."""
    ids, values = zip(*adjustments.bias, strict=True) if adjustments.bias else ((), ())
    lengths, words = list(map(len, adjustments.bad_words)), list(chain.from_iterable(adjustments.bad_words))
    counts = (len(ids), len(adjustments.allowed_ids), len(lengths), len(words))
    body = struct.pack(f"<{len(ids)}i{len(ids)}f{sum(counts[1:])}i", *ids, *values, *adjustments.allowed_ids, *lengths, *words)
    return _HEAD.pack(*adjustments.penalties, *counts) + body


def decode(data: bytes, offset: int) -> tuple[LogitAdjustments, int]:
    """What lies at `offset`, and where it ends; struct.error where it is cut."""
    repetition, presence, frequency, biased, allowed, words, word_ids = _HEAD.unpack_from(data, offset)
    body = struct.Struct(f"<{biased}i{biased}f{allowed + words + word_ids}i")
    numbers = iter(body.unpack_from(data, offset + _HEAD.size))
    ids, values, allowed_ids, lengths = (tuple(islice(numbers, count)) for count in (biased, biased, allowed, words))
    made = LogitAdjustments(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias=tuple(zip(ids, values, strict=True)),
        allowed_ids=allowed_ids,
        bad_words=tuple(tuple(islice(numbers, length)) for length in lengths),
    )
    return made, offset + _HEAD.size + body.size
