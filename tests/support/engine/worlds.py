"""Random small worlds for the scheduler: who asks what, and what the model would answer.

The model is a function of the prefix, so that what each request must give is known beforehand, with the mask of each of its tokens
(`World.answer`): no scheduling, no preemption, no rejected draft may show in it. `world_runs.simulate` runs a world.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

import msgspec
import numpy as np

from engine.adapters import NO_ADAPTER
from engine.core.draft_policy import DraftPolicy
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.plan import DEPTH
from engine.protocol import FinishReason, GenerateRequest, Grammar, PlacedItem, SamplingParams, pack_tokens
from engine.step_shapes import buckets
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.draws import chance, mixed
from tests.support.engine.kvmachine import contents, identity, root_of
from tests.support.engine.scheduling import SchedulerConfig
from tests.support.engine.world_masks import Consumed, Grammars, mask_of
from tests.support.engine.world_media import moved, show_media
from tests.support.engine.world_thoughts import draw_budget, end_mask, forced_token

STOP = 7
_MAX_REQUESTS = 14
TIMES = StepTimes(((1, 5.0), (6, 6.0)), ((1, 5.0), (8, 7.0), (32, 20.0)), ((1, 0.1), (6, 0.6)), 0.05, 0.02, 0.01, 4)

# What a world may have, and the share of worlds that have it. Each is drawn by itself, so any two meet.
FEATURES = {
    "drafts": 0.4, "prefix cache": 0.75, "fp8 KV": 0.3, "fair": 0.67, "token target": 0.3, "longest step": 0.3, "choices": 0.3,
    "adapters": 0.3, "media": 0.4, "grammars": 0.3, "all masked": 0.1, "thoughts": 0.3, "NaN": 0.33, "aborts": 0.67,
}  # fmt: skip


def features_of(seed: int) -> frozenset[str]:
    """Those of a world."""
    return frozenset(name for name, share in FEATURES.items() if chance(share, seed, crc32(name.encode())))



def drafting_times(drafts: int) -> StepTimes:
    """TIMES with those of steps with drafts, which are dear enough beside prompts to be left out."""
    points = tuple((count, ((1, 5.0 + count), (6, 6.0 + 2 * count))) for count in sorted({0, drafts}))
    return msgspec.structs.replace(TIMES, drafts=points if drafts else (), drafting=((1, 1.0), (6, 9.0)) if drafts else ())


@dataclass
class World:
    """Pools from two windows up, prompts from one token to beyond what fits, salts and priorities, surprise ends, rows of any
    width, logprobs of prompts, and FEATURES. In fp8 pages the scheduler must do what it does in others."""

    seed: int
    requests: list[GenerateRequest] = field(default_factory=list)
    answers: dict[int, "Answer"] = field(default_factory=dict)
    forked: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.features = features_of(self.seed)
        dtype = "float8_e4m3fn" if "fp8 KV" in self.features else "bfloat16"
        page = rng.choice((2, 4, 8))
        window = rng.randint(2, 4) * page - rng.randint(0, page - 1)
        max_len = rng.choice((24, 48, 96))
        self.groups = (
            KVGroup(0, "sliding", (0,), 1, 256, window, page, dtype, bidirectional=True),
            KVGroup(1, "full", (1,), 1, 512, None, page, dtype),
        )
        drafts = rng.choice((1, 3)) if "drafts" in self.features else 0
        caches = "prefix cache" in self.features
        two_windows = 2 * self.groups[0].worst_pages(max_len)
        pages = (two_windows + rng.choice((0, 1, 8)) + 1, -(-max_len // page) * rng.randint(1, 2) + rng.randint(-2, 3) + 1)
        self.config = SchedulerConfig(self.groups, pages, rng.randint(1, 6), max_len, rng.choice((3, 8, 32)), drafts, caches)
        self.config = replace(self.config, kv_events="collected", policy="fair" if "fair" in self.features else "arrival")
        if "token target" in self.features:
            self.config = replace(self.config, step_times=TIMES, tpot_target_ms=rng.choice((1.0, 8.0, 30.0)))
        if "longest step" in self.features:
            longest_ms = rng.choice((1.0, 7.0, 15.0))
            self.config = replace(self.config, step_times=drafting_times(drafts), longest_step_ms=longest_ms)
        self._ask(max_len)
        self.media: dict[int, tuple[PlacedItem, ...]] = {}  # by the seeds of their requests
        if "media" in self.features:
            self.config = replace(self.config, encoder_rows=rng.choice((1, 8, 100)))
            show_media(self)
        self.depth = rng.choice((2, 2, 2, 4))  # plans out at a time; the core keeps two
        self.stop_chance = rng.choice((0.0, 0.05, 0.2))
        self.abort_chance = rng.choice((0.02, 0.1)) if "aborts" in self.features else 0.0
        self.guess_chance = rng.choice((0.0, 0.3, 0.8, 1.0))
        self.nan_chance = 0.02 if "NaN" in self.features else 0.0
        self.follow_chance = rng.choice((0.0, 0.5, 0.9))  # an answer is followed by a next turn
        failing, complete, slow = rng.choice((0.0, 0.0, 0.03)), rng.choice((0.1, 0.5)), rng.choice((0.0, 0.03, 0.5))
        self.grammars = Grammars(self.seed, failing, complete, slow)
        if "grammars" in self.features:
            self._constrain(lambda number: rng.random() < 0.7, triggers=0.4)
        if "all masked" in self.features:
            self.all_masked()
        if "thoughts" in self.features:
            self._limit_thoughts()

    def all_masked(self) -> "World":
        """The same with a mask for every token of every request, and pages so few that some are preempted."""
        page, max_len = self.groups[0].page, self.config.max_len
        pages = (2 * self.groups[0].worst_pages(max_len) + 2, -(-max_len // page) + 2)
        self.config = replace(self.config, pages=pages, max_seqs=6)
        self._constrain(lambda number: True, triggers=0.0)
        return self

    def _constrain(self, chosen: Callable[[int], bool], triggers: float) -> None:
        """Grammars, each request its own; so many of them begin at a trigger, which every fifth token is."""
        for number, request in enumerate(self.requests):
            if chosen(number):
                trigger = 100 + number % 5 if chance(triggers, self.seed, number, 6) else None
                self.requests[number] = with_grammar(request, Grammar(str(number), trigger))

    def _limit_thoughts(self) -> None:
        """Budgets for two requests in three. Where a thought ends is known as many plans ahead as the core keeps out."""
        self.depth = min(self.depth, DEPTH)
        for number, request in enumerate(self.requests):
            if chance(0.7, self.seed, number, 7):
                grammar = request.params.grammar
                budget = draw_budget(self.seed, number, grammar and grammar.trigger)
                params = msgspec.structs.replace(request.params, thought=budget)
                self.requests[number] = msgspec.structs.replace(request, params=params)

    def _ask(self, max_len: int) -> None:
        """Prompts share beginnings now and then, the ends of turns in them."""
        rng = self.rng
        common = [STOP if rng.random() < 0.1 else rng.randint(10, 99) for _ in range(max_len)]
        for number in range(rng.randint(1, 8)):
            length = rng.randint(1, max_len + 2 if rng.random() < 0.1 else max_len // rng.choice((2, 8)))
            shared = rng.choice((0, length // 2, length - 1, length))
            prompt = common[:shared] + [rng.randint(10, 99) for _ in range(length - shared)]
            params = SamplingParams(
                max_tokens=rng.randint(1, max_len), stop_ids=(STOP,), min_tokens=rng.choice((0, 0, 3)), seed=rng.choice((0, number))
            )
            priority, salt = rng.choice((0, 0, 0, -1, 2)), rng.choice(("", "", "", "other"))
            params = msgspec.structs.replace(params, prompt_logprobs=0 if chance(0.25, self.seed, number, 0) else None)
            adapter = rng.choice((NO_ADAPTER, 0, 0, 1)) if "adapters" in self.features else NO_ADAPTER
            asked = {"clip": rng.random() < 0.5, "priority": priority, "salt": salt, "adapter": adapter}
            self.requests.append(GenerateRequest(id=number, prompt=pack_tokens(prompt), params=params, **asked))
        if "choices" in self.features:
            self._fork()

    def _fork(self) -> None:
        """Choices: the last prompt once more, or a few times, each with its own seed; they come right behind it."""
        last = self.requests[-1]
        for _ in range(self.rng.randint(1, 4)):
            params = msgspec.structs.replace(last.params, seed=1000 + len(self.requests))
            self.requests.append(msgspec.structs.replace(last, id=len(self.requests), params=params))
        self.forked = len(self.requests) - 1 - last.id

    def follow(self, request: GenerateRequest, tokens: list[int]) -> GenerateRequest | None:
        """The next turn of a conversation, now and then, while it fits."""
        turn = [*request.tokens, *tokens, *(self.rng.randint(10, 99) for _ in range(self.rng.randint(1, 6)))]
        if self.rng.random() >= self.follow_chance or len(turn) >= self.config.max_len or len(self.requests) >= _MAX_REQUESTS:
            return None
        params = msgspec.structs.replace(request.params, max_tokens=self.rng.randint(1, self.config.max_len))
        media = moved(request.media, len(self.requests))
        following = msgspec.structs.replace(request, id=len(self.requests), prompt=pack_tokens(turn), params=params, media=media)
        if (grammar := params.grammar) is not None:
            following = with_grammar(following, Grammar(str(following.id), grammar.trigger))
        self.requests.append(following)
        return following

    def drafting(self) -> DraftPolicy:
        """Any number for a step, or in every other world what the core chooses."""
        options, sizes = range(self.config.widest), buckets(self.config.max_seqs)
        return DraftPolicy(options, sizes, ()) if self.seed % 2 else AnyDrafts(options, sizes, self.seed)

    def nan(self, prefix: int) -> bool:
        """Whether the logits behind a prefix are not finite."""
        return chance(self.nan_chance, self.seed, prefix, 2)

    def token(self, prefix: int, position: int, seed: int) -> int:
        """The model: now and then a stop id."""
        drawn = mixed(self.seed, prefix, position, seed)
        return STOP if drawn % 1000 < 1000 * self.stop_chance else 100 + drawn % 5

    def guess(self, prefix: int, position: int) -> bool:
        """Whether a draft is right."""
        return chance(self.guess_chance, self.seed, prefix, position, 1)

    def answer(self, request: GenerateRequest) -> "Answer":
        """What the request must give, from the model, its grammar and its budget of thought alone."""
        if request.id not in self.answers:
            self.answers[request.id] = self._answer(request)
        return self.answers[request.id]

    def mask(self, number: int, position: int) -> np.ndarray | None:
        """What the mask of a request's token must be; None: there must be none."""
        request = self.requests[number]
        masks, at = self.answer(request).masks, position - len(request.tokens)
        return masks[at] if at < len(masks) else None

    def _answer(self, request: GenerateRequest) -> "Answer":
        answer, prefix, prompt, rules = Answer(), root_of(request.adapter), len(request.tokens), request.params.grammar
        for content in contents(request.tokens, request.media):
            prefix = identity(prefix, content)
        consumed = None if rules is None or rules.trigger is not None else Consumed()
        while True:
            if consumed is not None and self.grammars.fails(request.id, consumed):
                return answer
            mask = end_mask(request.params.thought, answer.tokens, None if consumed is None else mask_of(request.id, consumed))
            answer.masks.append(mask)
            if self.nan(prefix):
                return answer
            forced = forced_token(mask)
            token = self.token(prefix, prompt + len(answer.tokens), request.params.seed) if forced is None else forced
            answer.tokens.append(token)
            prefix = identity(prefix, token)
            if token == STOP and len(answer.tokens) > request.params.min_tokens:
                return replace(answer, finish=FinishReason.stop)
            if len(answer.tokens) >= min(request.params.max_tokens, self.config.max_len - prompt):
                return replace(answer, finish=FinishReason.length)
            consumed = None if rules is None else self._consumed(request.id, rules, consumed, token)

    def _consumed(self, number: int, rules: Grammar, before: Consumed | None, token: int) -> Consumed | None:
        """What a request's grammar has consumed behind one more token; None: tokens are free."""
        if before is None:
            return Consumed() if token == rules.trigger else None
        after = before.then(token)
        return None if rules.trigger is not None and self.grammars.ends(number, after) else after


def with_grammar(request: GenerateRequest, grammar: Grammar) -> GenerateRequest:
    """The request under a grammar."""
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))


@dataclass(frozen=True)
class Answer:
    """Of a request; `masks`: int32 [words] of each of its tokens, None where it is free."""

    tokens: list[int] = field(default_factory=list)
    masks: list[np.ndarray | None] = field(default_factory=list)
    finish: FinishReason = FinishReason.error
