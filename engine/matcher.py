"""Which token may come next, by a grammar: llguidance over a checkpoint's vocabulary, with every bound that keeps it cheap.

A grammar is text in llguidance's dialect of Lark, control tokens by id (`<[52]>`). Compiling takes about a millisecond, a mask tens
of microseconds; one that takes more than its fuel ends in an error of its own request, and of no other.
"""

from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import GenerationFailed, InvalidRequest

MAX_GRAMMAR_BYTES = 256 << 10
_LIMITS = LLParserLimits(max_items_in_row=2000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000)


class Vocabulary:
    """Token ids as llguidance wants them.

    `pieces` are each id's bytes, `special` ids stand for themselves, `ends` end a reply; `encode` tokenizes plain text, for what a
    grammar leaves no choice in is written as the tokenizer would.
    """

    def __init__(
        self, pieces: Sequence[bytes], special: frozenset[int], ends: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.size = len(pieces)
        self._tokenizer = LLTokenizer(_Pieces(pieces, special, ends, encode), n_vocab=len(pieces), eos_token=list(ends))  # type: ignore[arg-type]

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest that says what of the grammar cannot be kept, under `param`."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param}: the grammar is larger than {MAX_GRAMMAR_BYTES} bytes", param=param)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer, limits=_LIMITS)
        if failed:
            raise InvalidRequest(f"{param}: {messages[0][:500]}", param=param)

    def matcher(self, grammar: str) -> "Matcher":
        """A new reply's."""
        return Matcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS), self.size)


class Matcher:
    """One reply's state in its grammar."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher, self._size = matcher, size
        self._check()

    @property
    def complete(self) -> bool:
        """The reply may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> bytes:
        """A bit a token id, the lowest first: whether it may come next; an end id where the reply may end.

        Raises GenerationFailed where no token may: the vocabulary cannot write what the grammar wants.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        if not any(mask):
            raise GenerationFailed("no token of this model can go on as the grammar wants")
        return mask

    def consume(self, tokens: Sequence[int]) -> None:
        """Tokens that were sampled. Raises GenerationFailed for one that its mask forbids."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationFailed(f"the grammar: {self._matcher.get_error()[:500]}")


class _Pieces:
    """What llguidance reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, pieces: Sequence[bytes], special: frozenset[int], ends: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(pieces), sorted(special), ends[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
