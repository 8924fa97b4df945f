"""Masks of the tokens that may come next, for requests with a grammar or a thinking budget; made after each of their tokens.

    step n's tokens committed --> consumed --> masks of step n + 1, whose forward runs meanwhile --> sent, all of a step at once

A row is planned before its mask is made, so that it runs in every step (`late_masks`), with two exceptions: the first row waits for
its grammar, which is compiled in a thread; and because ranks sample a step only when all its masks are there, a grammar whose last
masks were slow has them made in a thread, and its rows planned afterwards. Every masked step gets its record; it leaves out rows
whose sequence has ended, was preempted or needs no mask any more.

With a trigger, tokens are free until that id comes. Then the row in flight is dropped, and its position computed again with a mask;
when the grammar is complete, tokens are free again. A grammar that fails, or allows no token, ends its own request.

A thought whose budget may end before the next commit has its rows planned as masked: rows before the end are free, and at the end
only the end marker may come (with a grammar: once the grammar allows it).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np

from engine.core.masked_reply import Compiled, MaskedReply, MaskedRow, present
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.thought_limit import ThoughtLimit
from engine.errors import GenerationFailed
from engine.matcher import Matcher, Vocabulary, threads
from engine.plan import DEPTH, StepPlan
from engine.protocol import GenerateRequest, SamplingParams
from engine.step_masks import allows, encode_masks, mask_words, only

SLOW_S = 0.002  # CPU time of a mask above which others do not wait for it: half a forward of 31B on four H200
SLOW_TOKENS = 16  # tokens for which a grammar counts as slow after a slow mask
GRAMMARS = 64  # compiled grammars that are kept for requests to come
_UNAVAILABLE = "grammars are not available: the checkpoint has no tokenizer that they can be made for"


class Masks:
    """The masks of one scheduler's requests. `vocabulary` None: the checkpoint has none, and grammars are refused.

    compiler, slow  executors that compile grammars and make slow masks; by default threads of its own
    """

    def __init__(
        self, scheduler: Scheduler, vocabulary: Vocabulary | None, compiler: Executor | None = None, slow: Executor | None = None
    ) -> None:
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._replies: list[MaskedReply] = []
        self._grammars: OrderedDict[str, Compiled] = OrderedDict()  # by text, the last one used at the end
        self._planned: deque[tuple[int, list[MaskedRow]]] = deque()  # steps whose masks have not gone out
        self._compiler = compiler or ThreadPoolExecutor(threads(4), thread_name_prefix="grammar")
        self._slow = slow or ThreadPoolExecutor(1, thread_name_prefix="slow-mask")

    @property
    def active(self) -> bool:
        """Whether there are requests that need masks, or steps that wait for some."""
        return bool(self._replies or self._planned)

    @property
    def making(self) -> bool:
        """Whether a request waits for a thread: then `advance` must be called again and again."""
        return any(reply.waits_for_thread for reply in self._replies)

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request that needs masks, and start to compile its grammar; or refuse it."""
        grammar, known = request.params.grammar, self._scheduler.find(client, request.id)
        if (refusal := self._refusal(request.params)) is not None:
            self._scheduler.refuse(client, request.id, refusal)
            return
        self._scheduler.add(client, request, masked=grammar is not None and grammar.trigger is None)
        sequence = self._scheduler.find(client, request.id)
        if sequence is not None and known is None:
            self._track(sequence, request.params)

    def _refusal(self, params: SamplingParams) -> str | None:
        """Why there can be no masks for a request; None: there can."""
        if self._vocabulary is None:
            return _UNAVAILABLE
        if params.thought is not None and not 0 <= params.thought.end < self._vocabulary.size:
            return f"the id {params.thought.end}, which is to end thoughts, is not one of the vocabulary"
        return None

    def _track(self, sequence: Sequence, params: SamplingParams) -> None:
        """Follow a queued request from now on. If its prompt leaves a thought open, that may have to end at once."""
        grammar, length = params.grammar, len(sequence.tokens)
        compiled = None if grammar is None else self._compiled(grammar.text)
        limit = None if params.thought is None else ThoughtLimit(params.thought, length)
        reply = MaskedReply(sequence, compiled, None if grammar is None else grammar.trigger, limit, length)
        self._replies.append(reply)
        if not sequence.masked:
            self._end_thought_in_time(reply)

    def advance(self) -> None:
        """Read what was committed; call it after each commit, and while something is `making`."""
        if ended := [reply for reply in self._replies if reply.sequence.ended]:
            self._forget(ended)
        wanted = [reply for reply in self._replies if self._read_tokens(reply)]
        if wanted:
            self._make_masks(wanted)

    def _forget(self, ended: list[MaskedReply]) -> None:
        """Follow these no longer, and cancel what threads have not started for them and nobody else."""
        self._replies = [reply for reply in self._replies if not reply.sequence.ended]
        wanted = {id(reply.compiled) for reply in self._replies}
        for reply in ended:
            reply.cancel(compiling=id(reply.compiled) not in wanted)

    def planned(self, plan: StepPlan) -> None:
        """A masked plan was just made: `due` will give its masks."""
        slots = set(plan.result_slots)
        sequences = ((reply, reply.sequence) for reply in self._replies if reply.sequence.masked)
        rows = [MaskedRow(reply, each.number, each.slot, each.high) for reply, each in sequences if each.slot in slots]
        assert rows, plan
        self._planned.append((plan.step, rows))

    def due(self) -> Iterator[bytes]:
        """The masks of planned steps, in order, up to the first step that lacks one."""
        while self._planned and all(row.ready for row in self._planned[0][1]):
            step, rows = self._planned.popleft()
            yield self._encoded(step, {row.slot: present(row.reply.mask) for row in rows if not row.unmasked})

    def discard(self) -> Iterator[bytes]:
        """Empty records for the steps still planned, so that ranks can finish them; their results are not wanted."""
        while self._planned:
            yield self._encoded(self._planned.popleft()[0], {})

    def _encoded(self, step: int, masks: Mapping[int, np.ndarray]) -> bytes:
        return encode_masks(step, masks, mask_words(present(self._vocabulary).size))

    def _read_tokens(self, reply: MaskedReply) -> bool:
        """Read a sequence's new tokens; whether it needs a mask that is to be made now."""
        if reply.making is not None and not self._take_slow(reply, reply.making):
            return False
        sequence = reply.sequence
        tokens, reply.read = sequence.tokens[reply.read :], len(sequence.tokens)
        if reply.limit is not None:
            reply.limit.read(tokens)
        try:
            if not reply.constrained:
                self._read_free_tokens(reply, tokens)
                return False
            if reply.matcher is None:
                self._start_grammar(reply)
                return False
            reply.matcher.consume(tokens)
        except GenerationFailed as error:
            self._scheduler.fail(sequence, str(error))
            return False
        if reply.trigger is not None and reply.matcher.complete:
            reply.matcher = None
            self._scheduler.unconstrain(sequence)
            self._end_thought_in_time(reply)
            return False
        if reply.length == len(sequence.tokens):
            return False
        if reply.slow:
            reply.making = self._slow.submit(self._mask_of, reply.matcher)
        return not reply.slow

    def _read_free_tokens(self, reply: MaskedReply, tokens: "array[int]") -> None:
        """No grammar holds now; if the last token is the trigger, it starts."""
        if reply.trigger in tokens:
            assert tokens[-1] == reply.trigger, (tokens, reply.trigger)
            reply.ending = False
            self._scheduler.constrain(reply.sequence, len(reply.sequence.tokens))
            self._start_grammar(reply)
        else:
            self._end_thought_in_time(reply)

    def _end_thought_in_time(self, reply: MaskedReply) -> None:
        """No grammar holds now: mask the rows if one that may be planned before the next commit has to end the thought."""
        if (limit := reply.limit) is None:
            return
        sequence, end, ending = reply.sequence, limit.ends_at, reply.ending
        reply.ending = end is not None and end < len(sequence.tokens) + DEPTH
        if end is not None and reply.ending and not ending:
            self._scheduler.constrain(sequence, end, late=True)
        elif ending and not reply.ending:
            self._scheduler.unconstrain(sequence)
        if reply.must_end:
            self._set_mask(reply, only(limit.end, present(self._vocabulary).size))

    def _start_grammar(self, reply: MaskedReply) -> None:
        """Set the first mask, once the grammar is compiled; GenerationFailed: it cannot be compiled."""
        if (compiled := present(reply.compiled)).done():
            matcher, bits = compiled.result()
            reply.matcher = matcher.fresh()
            self._set_mask(reply, bits)

    def _compiled(self, grammar: str) -> Compiled:
        """The grammar, compiled once for all requests that have it while it is among the last GRAMMARS used."""
        compiled = self._grammars.pop(grammar, None)
        if compiled is None or compiled.cancelled():
            compiled = self._compiler.submit(self._compile, grammar)
        self._grammars[grammar] = compiled
        if len(self._grammars) > GRAMMARS:
            self._grammars.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> tuple[Matcher, np.ndarray]:
        """In a thread: a matcher at the grammar's beginning, and its mask there. GenerationFailed where there is none."""
        matcher = present(self._vocabulary).matcher(grammar)
        return matcher, self._mask_of(matcher)

    def _mask_of(self, matcher: Matcher) -> np.ndarray:
        """In a thread: the mask of the matcher's next token; GenerationFailed as `Matcher.check`."""
        bits: np.ndarray = present(self._vocabulary).masks([matcher])[0]
        matcher.check(bits)
        return bits

    def _make_masks(self, wanted: list[MaskedReply]) -> None:
        """Make the mask of each one's next token."""
        matchers = [present(reply.matcher) for reply in wanted]
        for reply, matcher, bits in zip(wanted, matchers, present(self._vocabulary).masks(matchers), strict=True):
            try:
                matcher.check(bits)
            except GenerationFailed as error:
                self._scheduler.fail(reply.sequence, str(error))
            else:
                self._note_mask_time(reply, matcher)
                self._set_mask(reply, bits)

    def _take_slow(self, reply: MaskedReply, making: "Future[np.ndarray]") -> bool:
        """Take a slow mask if it is done; whether it is, and the request goes on."""
        if not making.done():
            return False
        reply.making = None
        try:
            bits = making.result()
        except GenerationFailed as error:
            self._scheduler.fail(reply.sequence, str(error))
            return False
        self._note_mask_time(reply, present(reply.matcher))
        self._set_mask(reply, bits)
        return True

    def _note_mask_time(self, reply: MaskedReply, matcher: Matcher) -> None:
        """Note whether the grammar counts as slow."""
        reply.slow = SLOW_TOKENS if matcher.mask_s > SLOW_S else max(0, reply.slow - 1)

    def _set_mask(self, reply: MaskedReply, bits: np.ndarray) -> None:
        """The mask of the next unread token is made. If the thinking budget is used up, only the end marker may come."""
        end = reply.limit.end if reply.limit is not None and reply.must_end else None
        reply.mask = bits if end is None or not allows(bits, end) else only(end, present(self._vocabulary).size)
        reply.length = reply.read
        self._scheduler.mask_ready(*reply.sequence.key, reply.length, late=reply.ending or not reply.slow)
