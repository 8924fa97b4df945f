"""Allowed next tokens by a grammar: llguidance over a checkpoint's vocabulary, with bounded cost.

A grammar is llguidance's Lark, control tokens by id (`<[52]>`). Compiling takes a millisecond, a mask tens of microseconds.
"""

import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.architectures import read_model
from engine.errors import CheckpointError, GenerationFailed
from engine.pieces import Pieces, read_eos, read_tokenizer
from engine.step_masks import allows, mask_words

_POSITION = re.compile(r"(?:at )?\d+\(\d+\): ")  # a place in the whole grammar, of which a client wrote a part at most
_DUMP = re.compile(r"\n\s*\d+ \| |\n?<state>")  # how the grammar's text, or the parser's state, begins where llguidance shows it
_LONGEST = 300  # characters of a complaint
MAX_GRAMMAR_BYTES = 512 << 10
_AHEAD_S = 0.002  # CPU time of a thread for masks after drafts: half a forward of 31B on four H200
_MASKS_A_THREAD = 8  # at least: waking one takes as long as making some
_LIMITS = LLParserLimits(  # lexer states made during replies are kept: 50 000 take 50 MB
    max_items_in_row=2000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=50_000
)
# llguidance compiles by recursion, and an overflow of the stack ends the process. The check of a grammar has less of everything
# than the core has, so that the core compiles what the check has accepted.
COMPILE_STACK_BYTES = 16 << 20
CHECK_STACK_BYTES = 8 << 20
_CHECK_LIMITS = LLParserLimits(
    max_items_in_row=1500, initial_lexer_fuel=750_000, step_lexer_fuel=100_000, step_max_items=25_000, max_lexer_states=25_000
)
_WALKS = 20  # of a check: most walks through a grammar, then most tokens of each, and of all
_WALK_TOKENS = 100
_ALL_WALKS_TOKENS = 250
_CHECK_S = 1.0  # of CPU, after which a check walks no further: one whose masks are slow is no error
_CLOSERS = frozenset(b'"}],:')  # tokens that begin with one of these lead out of a string, or out of a list


def threads(most: int) -> int:
    return max(1, min(most, (os.cpu_count() or 1) // 4))


_MASK_THREADS = threads(8)


@contextmanager
def compile_stack(size: int = COMPILE_STACK_BYTES) -> Iterator[None]:
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)


class Vocabulary:
    """A tokenizer's pieces for llguidance, for a model of `size` ids, `ends` among them. CheckpointError: no end id. Takes a
    second or two at 262 144 pieces.
    """

    def __init__(self, pieces: Pieces, ends: Sequence[int], size: int) -> None:
        if not ends:
            raise CheckpointError("no file names the ids that end a reply")
        self.size = size
        self._threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="masks")  # llguidance releases the GIL
        table = [pieces.bytes_of(token) if token < len(pieces.table) else b"" for token in range(size)]
        special = sorted(token for token in pieces.special if token < size)
        closers = [token for token, piece in enumerate(table) if piece[:1] and piece[0] in _CLOSERS]
        self._closers = _bits_of([*closers, *special], size)
        wrapped = _Pieces(table, special, ends[0])
        self._tokenizer = LLTokenizer(wrapped, n_vocab=size, eos_token=list(ends))  # type: ignore[arg-type]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """CheckpointError: no tokenizer, or no end id."""
        return cls(Pieces.of(read_tokenizer(folder)), read_eos(folder), read_model(folder).vocab)

    def complaint(self, grammar: str) -> str | None:
        """What is wrong with the grammar, in a sentence; None: random replies met no error, with less fuel than the core gives.
        Walks at most some 300 masks.
        """
        ends = time.thread_time() + _CHECK_S
        try:
            first = self._matcher(grammar, _CHECK_LIMITS)
            walked = 0
            for seed in range(_WALKS):
                if walked < _ALL_WALKS_TOKENS and time.thread_time() < ends:
                    walked += self._walk(first.fresh(frees=False), random.Random(seed), ends)  # noqa: S311 - it need not be secret
        except GenerationFailed as error:
            return str(error)
        return None

    def matcher(self, grammar: str) -> "Matcher":
        return self._matcher(grammar, _LIMITS)

    def _matcher(self, grammar: str, limits: LLParserLimits) -> "Matcher":
        return Matcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), self.size)

    def _walk(self, matcher: "Matcher", rng: random.Random, ends: float) -> int:
        """Consume random allowed tokens, half of them such that end something, until `ends` by this thread's clock; returns their
        number."""
        for count in range(_WALK_TOKENS):
            allowed = matcher.mask()
            closers = allowed & self._closers
            matcher.consume(_random_token(closers if closers.any() and rng.random() < 0.5 else allowed, rng))
            if matcher.inner.is_stopped() or time.thread_time() > ends:
                return count + 1
        return _WALK_TOKENS

    def masks(self, matchers: Sequence["Matcher"], drafts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Each matcher's masks as in `engine.step_masks`, int32 [n, words]; several threads make
        many."""
        ends = list(accumulate(1 + len(drafted) for drafted in drafts))
        bits = np.split(np.zeros((ends[-1], mask_words(self.size)), np.int32), ends[:-1])
        step = max(1, min(_MASK_THREADS, len(matchers), ends[-1] // _MASKS_A_THREAD))
        parts = [(matchers[first::step], drafts[first::step], bits[first::step]) for first in range(step)]
        futures = [self._threads.submit(_fill, *part) for part in parts[1:]]
        bits[::step] = _fill(*parts[0])
        for first, future in enumerate(futures, 1):
            bits[first::step] = future.result()
        return bits


def _fill(matchers: Sequence["Matcher"], drafts: Sequence[Sequence[int]], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Next-token masks first, then masks after drafted tokens until the time budget ends; returns
    the filled rows."""
    for matcher, bits in zip(matchers, masks, strict=True):
        matcher.fill(bits[0])
    until = time.thread_time() + _AHEAD_S
    rows = zip(matchers, drafts, masks, strict=True)
    return [bits[: 1 + matcher.fill_ahead(drafted, bits, until)] if drafted else bits for matcher, drafted, bits in rows]


class Matcher:
    """`mask_s`: CPU seconds of its last mask. `frees`: any token may follow the grammar's end."""

    def __init__(self, matcher: LLMatcher, size: int, *, frees: bool = False) -> None:
        self.inner = matcher
        self._size = size
        self.frees = frees
        self.mask_s = 0.0
        self._check()

    @property
    def complete(self) -> bool:
        return self.inner.is_accepting()

    def mask(self) -> np.ndarray:
        """int32 [words], a bit a token id; an end id where the reply may end. GenerationFailed: no token is allowed."""
        bits = np.zeros(mask_words(self._size), np.int32)
        self.fill(bits)
        self.check(bits)
        return bits

    def fill(self, bits: np.ndarray) -> None:
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.mask_s = time.thread_time() - began

    def fill_ahead(self, drafts: Sequence[int], masks: np.ndarray, until: float) -> int:
        """Write masks after each draft, int32 [1 + drafts, words], the first given; returns their
        number. A forbidden draft or the CPU time `until` ends it."""
        ahead = self.inner.deep_copy()
        for count, token in enumerate(drafts, 1):
            if ahead.is_stopped() or not allows(masks[count - 1], token) or time.thread_time() > until:
                return count - 1
            ahead.consume_token(token)
            if self.frees and ahead.is_accepting():
                masks[count:] = -1
                break
            ahead.unsafe_compute_mask_ptr(masks[count].ctypes.data, masks[count].nbytes)
            if ahead.is_error():
                return count - 1
        return len(drafts)

    def check(self, bits: np.ndarray) -> None:
        """GenerationFailed: the mask failed, or allows no token."""
        self._check()
        if not bits.any():
            raise GenerationFailed("no token of this model can go on as the grammar wants")

    def fresh(self, *, frees: bool) -> "Matcher":
        """A copy. This one must be at the beginning."""
        return Matcher(self.inner.deep_copy(), self._size, frees=frees)

    def consume(self, token: int) -> None:
        """GenerationFailed if the token's mask forbids it."""
        self.inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self.inner.is_error():
            raise GenerationFailed(f"the grammar: {_sentence(self.inner.get_error())}")


def _bits_of(tokens: Sequence[int], size: int) -> np.ndarray:
    flags = np.zeros(32 * mask_words(size), np.uint8)
    flags[np.asarray(tokens, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _random_token(mask: np.ndarray, rng: random.Random) -> int:
    word = rng.choice(np.flatnonzero(mask).tolist())
    bits = int(mask[word]) & 0xFFFFFFFF
    return 32 * word + rng.choice([bit for bit in range(32) if bits >> bit & 1])


def _sentence(error: str) -> str:
    """llguidance's error without the grammar's text and the parser's state."""
    plain = " ".join(_DUMP.split(_POSITION.sub("", error, count=1), 1)[0].split())[:_LONGEST]
    if plain == "NoExtensionBias":
        return "no text matches it"
    return plain


@dataclass
class _Pieces:
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, _: str) -> list[int]:
        """Called only for grammars that force tokens, which ours do not (`engine.front.grammar`)."""
        return []
