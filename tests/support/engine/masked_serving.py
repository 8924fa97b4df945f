"""Requests with grammars, served by the core's scheduler and masks over ranks whose model knows nothing of grammars: a masked row
gives any token that its mask allows, every other any token at all."""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.loop import Intake
from engine.core.masks import Masks
from engine.front.reply import Markers
from engine.front.text import TextProcessor
from engine.matcher import Vocabulary
from engine.plan import StepResult
from engine.protocol import GenerateRequest, Grammar, Output, SamplingParams, pack_tokens
from tests.support.engine.draws import mixed
from tests.support.engine.masked_ranks import MaskedRanks
from tests.support.engine.plans import DecodeRow, decode_rows
from tests.support.engine.scheduling import SchedulerConfig, scheduler_of, two_groups
from tests.support.engine.walker import candidates

Known = dict[tuple[int, int], int]
GROUPS = two_groups()
HURRY = 120  # tokens after which a reply takes the shortest way out


class MaskedMachine(MaskedRanks):
    """One in ten of the tokens without a mask is one of `marks`. `known`: tokens behind prefixes, by these and the seed: guessed as
    drafts, and noted."""

    def __init__(
        self, text: TextProcessor, pages: tuple[int, ...], slots: int, max_len: int, marks: tuple[int, ...], known: Known
    ) -> None:
        super().__init__(GROUPS, pages, slots, max_len, mixed)
        self._text, self._marks, self._known = text, marks, known
        self._begun = [0] * slots

    def result(self) -> StepResult:
        """Run the oldest plan."""
        for admission in self.queue[0].admissions:
            self._begun[admission.slot] = admission.prompt
        return super().result()

    def _likely(self, slot: int, prefix: int, position: int) -> int:
        known = self._known.get((self.seed[slot], prefix))
        return self._free(slot, prefix, position) if known is None else known

    def _free(self, slot: int, prefix: int, position: int) -> int:
        drawn = self.model(prefix, position, self.seed[slot])
        return self._marks[drawn // 10 % len(self._marks)] if drawn % 10 == 0 else 200 + drawn % 700

    def _token(self, slot: int, prefix: int, position: int) -> int:
        token = self._known[self.seed[slot], prefix] = self._sampled(slot, prefix, position)
        return token

    def _sampled(self, slot: int, prefix: int, position: int) -> int:
        drawn, bits = super()._token(slot, prefix, position), self.mask(slot, position)
        if bits is None:
            return self._free(slot, prefix, position)
        hurry = position - self._begun[slot] > HURRY
        marks, others = candidates(self._text, bits, hurry=hurry)
        choices = marks if marks and (hurry or drawn % 10 < 3) else others
        return choices[drawn % len(choices)]


MAX_LEN = 512
PAGES = (200, 300)  # of four tokens: ten long replies do not fit together


@dataclass
class Model:
    """The nano's vocabulary, as front and core have it."""

    text: TextProcessor
    vocabulary: Vocabulary
    markers: Markers


@dataclass
class MaskedRun:
    """What came of some requests."""

    outputs: list[Output] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0
    prefill: int = 0  # tokens of chunks
    given: dict[int, list[int]] = field(default_factory=dict)  # steps of each request's tokens
    rows: list[DecodeRow] = field(default_factory=list)
    known: Known = field(default_factory=dict)

    def tokens(self, request: int) -> list[int]:
        return [token for output in self.outputs if output.id == request for token in output.tokens]

    def end(self, request: int) -> Output:
        (end,) = [output for output in self.outputs if output.id == request and output.finish]
        return end


def serve(
    model: Model,
    requests: Iterable[GenerateRequest],
    pages: tuple[int, ...] = PAGES,
    marks: tuple[int, ...] = (),
    prefix_cache: bool = True,
    drafts: int = 0,
    known: Known | None = None,
) -> MaskedRun:
    """As the core's loop does it, two plans out at a time. known: what another run gave, which is drafted."""
    served = MaskedRun(known=dict(known or {}))
    scheduler = scheduler_of(SchedulerConfig(GROUPS, pages, 10, MAX_LEN, 32, drafts, prefix_cache=prefix_cache))
    masks = Masks(scheduler.requests, model.vocabulary, scheduler.config.widest)
    machine = MaskedMachine(model.text, pages, 10, MAX_LEN, marks or (model.markers.begin_call,), served.known)
    for request in requests:
        Intake(scheduler.requests, masks).add(request)
    while scheduler.requests.unfinished or scheduler.in_flight:
        if masks.making:
            masks.advance()
        while scheduler.in_flight < 2 and (plan := scheduler.schedule()) is not None:
            machine.submit(plan)
            served.prefill += plan.prompt_tokens
            served.rows += decode_rows(plan)
            if plan.masked:
                masks.planned(plan)
        for data in masks.due():
            machine.submit_masks(data)
        if scheduler.in_flight:
            scheduler.commit(machine.result())
            masks.advance()
            served.steps += 1
        else:
            time.sleep(0.001)
        outputs = scheduler.requests.drain()
        served.outputs += outputs
        for output in outputs:
            served.given.setdefault(output.id, []).extend([served.steps] * len(output.tokens))
    served.preemptions = scheduler.requests.counters.preemptions
    return served


def request(model: Model, number: int, rules: Grammar | None, max_tokens: int = 300) -> GenerateRequest:
    prompt = [model.text.encode("Hello", add_bos=True)[0], *random.Random(number).choices(range(200, 900), k=3 + number % 9)]
    params = SamplingParams(max_tokens=max_tokens, stop_ids=model.text.eos_ids, seed=number, grammar=rules)
    return GenerateRequest(id=number, prompt=pack_tokens(prompt), params=params, clip=True)
