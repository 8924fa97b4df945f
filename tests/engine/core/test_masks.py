"""Masks: what random models write under them is what their grammars want, whatever is preempted; and nobody else notices."""

import json
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLParserLimits

from engine.core.masks import Masks
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.front.call_grammar import CallGrammar
from engine.front.generation import Choice
from engine.front.grammar import Thought, begun_call, choice_answer, grammar, json_answer, regex_answer
from engine.front.reply import Markers, ReplyParser
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from engine.matcher import Matcher, Vocabulary
from engine.plan import ROW_MASKED
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Grammar, ThoughtBudget
from engine.step_masks import StepMasks, allows, decode_masks
from tests.conftest import Nano
from tests.support.engine.executors import AtOnce, Later
from tests.support.engine.masked_machine import GROUPS
from tests.support.engine.masked_ranks import a_token_old, left_out, of_another_row
from tests.support.engine.masked_serving import MAX_LEN, PAGES, MaskedRun, Model, request, serve
from tests.support.engine.scheduling import SchedulerConfig, scheduler_of
from tests.support.engine.schemas import members, tools_of
from tests.support.engine.walker import choice_of
from tests.support.engine.world_faults import thoughts_end_late, without_cuts

pytestmark = pytest.mark.pure

TIGHT = (60, 56)


@pytest.fixture(scope="module")
def model(nano: Nano) -> Model:
    text = TextProcessor.load(nano("31b"))
    markers = Markers.of(text)
    return Model(text, Vocabulary.of(text.pieces, text.eos_ids, text.vocab_size), markers)


def said(model: Model, tokens: list[int], *, cut: bool, tools: Tools | None = None) -> Choice:
    """The reply, taken apart."""
    tokens = tokens[:-1] if tokens and tokens[-1] in model.text.eos_ids else tokens
    return choice_of(ReplyParser(model.text.pieces, model.markers, tools), tokens, cut=cut)


def wanted(seed: int) -> dict[str, Any]:
    return members(random.Random(seed), 2)


def calls_of(model: Model, schemas: dict[str, dict[str, Any]]) -> Grammar:
    """Of strict calls, wherever the model begins one."""
    return Grammar(begun_call(CallGrammar(model.markers, schemas, schemas)), model.markers.begin_call)


def json_requests(model: Model, count: int) -> list[GenerateRequest]:
    """Every third is free; thoughts before, or not."""
    thoughts = (Thought.none, Thought.optional, Thought.forced)
    rules = [Grammar(grammar(model.markers, json_answer(wanted(at)), thoughts[at % 4 % 3])) for at in range(count)]
    return [request(model, at, None if at % 3 == 2 else rules[at], 40 if at % 3 == 2 else 300) for at in range(count)]


def valid_json(model: Model, served: MaskedRun, count: int) -> list[int]:
    """Which of the requests with a schema kept it."""
    kept = []
    for at in range(count):
        if at % 3 == 2 or served.end(at).finish is not FinishReason.stop:
            continue
        try:
            jsonschema.validate(json.loads(said(model, served.tokens(at), cut=False).content), wanted(at))
        except (ValueError, jsonschema.ValidationError):
            continue
        kept.append(at)
    return kept


COUNT = 18


@pytest.mark.parametrize("pages", [PAGES, TIGHT])
def test_replies_keep_their_grammars(model: Model, pages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random schemas beside free requests: every reply is valid, also where sequences are preempted; the free ones give what they
    give alone. Without threads, whose time decides how many run side by side."""
    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    requests = json_requests(model, COUNT)
    served = serve(model, requests, pages=pages)
    assert valid_json(model, served, COUNT) == [at for at in range(COUNT) if at % 3 != 2]
    assert (served.preemptions > 0) == (pages == TIGHT)
    alone = serve(model, [each for each in requests if each.params.grammar is None])
    assert [alone.tokens(at) for at in range(2, COUNT, 3)] == [served.tokens(at) for at in range(2, COUNT, 3)]
    assert alone.steps < served.steps


@pytest.mark.parametrize("fault", [of_another_row, a_token_old(), left_out])
def test_a_wrong_mask_is_seen(
    model: Model, fault: Callable[[StepMasks], StepMasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of the neighbour, one token old, or none: hardly a reply is valid, and those that break their grammar end in error."""
    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    served = serve(model, json_requests(model, COUNT), fault)
    assert len(valid_json(model, served, COUNT)) <= 2
    assert sum(output.finish is FinishReason.error for output in served.outputs) >= 8


@pytest.mark.parametrize("pages", [PAGES, TIGHT])
def test_calls_behind_a_trigger_keep_their_schemas(model: Model, pages: tuple[int, ...]) -> None:
    """auto: text is free; every call that the model begins names a tool and keeps its schema, and text goes on behind it."""
    schemas = {name: wanted(at) for at, name in enumerate(("get_weather", "run-it"))}
    tools, rules = tools_of(schemas), calls_of(model, schemas)
    served = serve(model, [request(model, at, rules) for at in range(8)], pages=pages)
    calls = texts = 0
    for at in range(8):
        choice = said(model, served.tokens(at), cut=True, tools=tools)
        assert served.end(at).finish is FinishReason.length
        ended = served.tokens(at).count(model.markers.end_call)
        for call in choice.calls[:ended]:
            jsonschema.validate(json.loads(call.text), schemas[call.name])
        calls += ended
        texts += bool(choice.content)
    assert calls > 40
    assert texts == 8


def behind_the_first(masks: StepMasks) -> StepMasks:
    """Planted fault: each slot has its first token's mask last."""
    order = np.argsort(masks.slots, kind="stable")
    order = np.concatenate([np.roll(each, -1) for each in np.split(order, np.flatnonzero(np.diff(masks.slots[order])) + 1)])
    return masks._replace(slots=masks.slots[order], bits=masks.bits[order])


def not_taken_back(matcher: Matcher, drafts: list[int], masks: np.ndarray, until: float) -> int:
    """Planted fault: the drafts that masks were made behind stay in the matcher."""
    for at, token in enumerate(drafts, 1):
        if not allows(masks[at - 1], token):
            return at - 1
        matcher.inner.consume_token(token)
        matcher.fill(masks[at])
    return len(drafts)


def test_calls_are_drafted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text as in calls rows have drafts. What a row gave behind a trigger is dropped, and behind a call's end tokens are free:
    the tokens are those without drafts, in fewer steps, whether all are guessed or few. Planted faults change them: tokens behind a
    trigger are read as text; a row's masks are shifted by one; drafts stay in the matcher."""
    rules = calls_of(model, {"get_weather": wanted(0)})
    asked = [request(model, at, rules) for at in range(5)]

    def tokens(run: MaskedRun) -> list[list[int]]:
        return [run.tokens(at) for at in range(5)]

    plain = serve(model, asked)
    few, served = serve(model, asked, drafts=3), serve(model, asked, drafts=3, known=plain.known)
    assert tokens(few) == tokens(served) == tokens(plain)
    assert served.steps < 0.4 * plain.steps < 0.8 * few.steps
    assert sum(each.count(model.markers.begin_call) for each in tokens(served)) > 5
    for flags in (0, ROW_MASKED):
        assert [row.width for row in served.rows if row.flags == flags].count(4) > 50

    def differs(**plants: Any) -> bool:
        try:
            return tokens(serve(model, asked, drafts=3, known=plain.known, **plants)) != tokens(plain)
        except AssertionError:
            return True

    assert differs(plant=behind_the_first)
    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "fill_ahead", not_taken_back)
        assert differs()

    without_cuts(monkeypatch)
    assert differs()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_begun_call_computes_one_position_again(model: Model, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a trigger comes, the row in flight is dropped and its position runs again as a decode row: no step has a chunk for it,
    with or without a prefix cache. The tokens are those of a sequence that is queued anew for it, which computes chunks."""
    rules = calls_of(model, {"get_weather": wanted(0)})
    asked = [request(model, at, rules) for at in range(5)]
    served = serve(model, asked, pages=(PAGES[0], 400), prefix_cache=prefix_cache)
    assert served.prefill == sum(len(each.tokens) for each in asked)
    calls = [served.tokens(at).count(model.markers.begin_call) for at in range(5)]
    assert min(calls) > 1

    advance, stepped = Masks.advance, []

    def step_back(sequence: Sequence) -> None:
        stepped.append(sequence)

    monkeypatch.setattr(Sequence, "step_back", step_back)

    def queue_anew(masks: Masks) -> None:
        advance(masks)
        while stepped:
            masks._requests.preempt(stepped.pop())

    monkeypatch.setattr(Masks, "advance", queue_anew)
    queued = serve(model, asked, pages=(PAGES[0], 400), prefix_cache=prefix_cache)
    assert [served.tokens(at) for at in range(5)] == [queued.tokens(at) for at in range(5)]
    assert queued.prefill >= served.prefill + sum(calls)


LABEL = 2


def thinking(model: Model, number: int, budget: int | None, rules: Grammar | None = None, **more: Any) -> GenerateRequest:
    """A request whose thoughts may have so many tokens."""
    asked, markers = request(model, number, rules, 120), model.markers
    known = {"label": LABEL, "begin_call": markers.begin_call, "open_label": None} | more
    thought = None if budget is None else ThoughtBudget(budget, markers.begin_thought, markers.end_thought, **known)
    return msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, thought=thought))


def thoughts(model: Model, tokens: list[int]) -> list[int]:
    """Tokens of each thought that has ended."""
    lengths, since = [], None
    for at, token in enumerate(tokens):
        if since is None:
            since = at if token == model.markers.begin_thought else None
        elif token in (model.markers.end_thought, model.markers.begin_call):
            lengths.append(at - since - 1)
            since = None
    return lengths


BUDGETS = (0, 1, 2, 3, 9, 30, None, 0, 1)


def over_budget(model: Model, served: MaskedRun) -> list[int]:
    """Requests of BUDGETS whose first thought is not of its budget, or whose others are more than their labels."""
    wrong = []
    for at, budget in enumerate(BUDGETS):
        found = thoughts(model, served.tokens(at))
        expected = [] if budget is None else [LABEL + budget, *[LABEL] * (len(found) - 1)]
        wrong += [at] if not found or found != expected else []
    return wrong


@pytest.mark.parametrize("pages", [PAGES, TIGHT])
def test_thoughts_end_with_their_budgets(model: Model, pages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that never ends a thought: the marker comes behind exactly so many tokens, up to it they are those of a reply
    without a budget, and neighbours' are untouched, whatever is preempted; a budget off by one, and masks left out, are seen."""
    asked = [thinking(model, at, budget) for at, budget in enumerate(BUDGETS)]
    begin = (model.markers.begin_thought,)
    served = serve(model, asked, pages=pages, marks=begin)
    free = serve(model, [thinking(model, at, None) for at in range(len(BUDGETS))], marks=begin)
    assert over_budget(model, served) == [BUDGETS.index(None)]
    assert (served.preemptions > 0) == (pages == TIGHT)
    for at in range(len(BUDGETS)):
        tokens = served.tokens(at)
        before = tokens.index(model.markers.end_thought) if model.markers.end_thought in tokens else len(tokens)
        assert tokens[:before] == free.tokens(at)[:before]
    assert len(over_budget(model, serve(model, asked, left_out, pages, marks=begin))) == len(BUDGETS)
    thoughts_end_late(monkeypatch)
    assert len(over_budget(model, serve(model, asked, pages=pages, marks=begin))) == len(BUDGETS)


def broken_budgets(model: Model, seed: int) -> list[str]:
    """What is wrong with the thoughts of random requests, some with calls' grammars, in pools that are tight in half of them."""
    rng, markers = random.Random(seed), model.markers
    calls = calls_of(model, {"run-it": members(rng, 1)})
    budgets = [rng.choice((0, 1, 2, 5, 20)) for _ in range(8)]
    asked = [thinking(model, 100 * seed + at, budget, rng.choice((None, calls))) for at, budget in enumerate(budgets)]
    marks = (markers.begin_thought, markers.begin_call, markers.end_thought)
    served = serve(model, asked, pages=rng.choice((PAGES, TIGHT)), marks=marks)
    wrong = []
    for one, budget in zip(asked, budgets, strict=True):
        left = budget
        for length in thoughts(model, served.tokens(one.id)):
            left -= max(0, length - LABEL)
        if left < 0 or served.end(one.id).finish is FinishReason.error:
            wrong.append(f"seed {seed}: {budget} tokens, {left} left, {served.end(one.id)}")
    return wrong


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 300), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_budgets_hold_in_random_cases(model: Model, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts that end by themselves, by calls and by budgets, whatever is preempted: none is longer than its budget; where that
    is off by one some are."""
    assert [wrong for seed in seeds for wrong in broken_budgets(model, seed)] == []
    thoughts_end_late(monkeypatch)
    assert broken_budgets(model, seeds[0])


def test_a_budget_holds_in_every_step(model: Model) -> None:
    """The end of a thought costs no step: its mask is made while the forward of its step runs."""
    served = serve(model, [thinking(model, at, 5) for at in range(4)], marks=(model.markers.begin_thought,))
    assert all(thoughts(model, served.tokens(at)) for at in range(4))
    assert {gap for at in range(4) for gap in gaps(served.given[at])} == {1}


def test_a_thought_of_the_prompt_has_a_budget(model: Model) -> None:
    """Where the prompt leaves a thought open the reply's tokens count at once, behind what is missing of the label."""
    asked = [thinking(model, at, budget, open_label=label) for at, (budget, label) in enumerate([(0, 0), (1, 0), (0, 2), (5, 1)])]
    served = serve(model, asked, marks=(model.markers.begin_thought,))
    assert [served.tokens(at).index(model.markers.end_thought) for at in range(4)] == [0, 1, 2, 6]


def test_a_budget_beside_grammars(model: Model) -> None:
    """Calls that end a thought keep their schemas and the budget holds for the next one; a form's thought ends with it too."""
    schemas, budget = {"get_weather": wanted(0)}, 3
    tools, calls = tools_of(schemas), calls_of(model, schemas)
    form = Grammar(grammar(model.markers, choice_answer(["yes"]), Thought.forced))
    asked = [thinking(model, at, budget, calls if at % 2 else form) for at in range(12)]
    served = serve(model, asked, marks=(model.markers.begin_thought, model.markers.begin_call))
    free = serve(model, [request(model, at, form) for at in range(0, 12, 2)])
    ended = 0
    for at in range(1, 12, 2):
        spent = [max(0, length - LABEL) for length in thoughts(model, served.tokens(at))]
        assert sum(spent) <= budget
        choice = said(model, served.tokens(at), cut=True, tools=tools)
        for call in choice.calls[: served.tokens(at).count(model.markers.end_call)]:
            jsonschema.validate(json.loads(call.text), schemas["get_weather"])
            ended += 1
    assert ended > 6
    label = len("thought\n")  # its characters may come one by one
    assert [served.end(at).finish for at in range(0, 12, 2)] == ["stop"] * 6
    assert all(thoughts(model, served.tokens(at))[0] <= label + budget for at in range(0, 12, 2))
    assert any(thoughts(model, free.tokens(at))[0] > label + budget for at in range(0, 12, 2))


def gaps(steps: list[int]) -> list[int]:
    """Between neighbours."""
    return [after - before for before, after in pairwise(steps)]


def test_a_row_with_a_grammar_runs_in_every_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is made behind its plan, so that it gives a token a step, as its free neighbour does; a grammar whose masks are slow
    has a row in every second step at most, with the same tokens, and its neighbour still gives a token a step."""
    rules = Grammar(grammar(model.markers, regex_answer("[a-z]{300,400}"), Thought.none))
    requests = [request(model, 0, rules, 60), request(model, 1, None, 200)]
    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("engine.core.masks.SLOW_S", 1e9)
    late = serve(model, requests)
    monkeypatch.setattr("engine.core.masks.SLOW_S", -1.0)
    slow = serve(model, requests)
    assert [slow.tokens(at) for at in range(2)] == [late.tokens(at) for at in range(2)]
    assert len(late.given[0]) > 20
    assert set(gaps(late.given[0])) == set(gaps(late.given[1])) == set(gaps(slow.given[1])) == {1}
    beside = [step for step in slow.given[0] if step < slow.given[1][-1]]  # alone it has a row in every step: there are no others
    assert len(beside) > 20
    assert min(gaps(beside)[1:]) >= 2, "the first is planned before its mask is known to be slow"


def masked_scheduler(vocabulary: Vocabulary | None, compiler: Executor | None = None) -> tuple[Scheduler, Masks]:
    """A scheduler without requests, and its masks."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, PAGES, 4, MAX_LEN, 32))
    masks = Masks(scheduler.requests, vocabulary, scheduler.config.widest)
    masks._compiler = compiler or masks._compiler
    return scheduler, masks


def matching(model: Model, number: int, pattern: str) -> GenerateRequest:
    """A request whose reply matches a regular expression."""
    return request(model, number, Grammar(grammar(model.markers, regex_answer(pattern), Thought.none)))


def test_ranks_that_are_told_to_stop_get_masks(model: Model) -> None:
    """A step whose masks nobody will make any more can be ended: its record comes, and lets every token come."""
    scheduler, masks = masked_scheduler(model.vocabulary)
    masks.add(matching(model, 1, "[a-z]+"))
    while masks.making:
        masks.advance()
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        masks.planned(plan)
    assert [decode_masks(data).step for data in masks.due()] == [1]
    (data,) = masks.discard()
    assert (decode_masks(data).step, len(decode_masks(data).slots)) == (2, 0)
    assert not list(masks.due())


def test_a_grammar_that_cannot_go_on_ends_its_own_request(model: Model) -> None:
    """A grammar that does not compile, and one that no token can follow, are errors that say so; the neighbour is served."""
    fine = Grammar(grammar(model.markers, choice_answer(["yes"]), Thought.none))
    broken = Grammar("%llguidance {}\nstart: nothing\n")
    stuck = Grammar("%llguidance {}\nstart: <[1000000]>\n")
    served = serve(model, [request(model, at, rules) for at, rules in enumerate((broken, fine, stuck, None))])
    assert [served.end(at).finish for at in range(4)] == ["error", "stop", "error", "length"]
    assert all((served.end(at).error or "") != "" for at in (0, 2))
    assert said(model, served.tokens(1), cut=False).content == "yes"


def test_a_grammar_that_failed_is_compiled_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a grammar share its lexer, which stays broken where a reply had it grow too large: the next request gets one of
    its own, and as many tokens. Planted fault: it shares the broken one, and gets none."""
    rules = Grammar(grammar(model.markers, regex_answer("(a|b)*a(a|b){300}"), Thought.none))
    made: list[Masks] = []
    begin = Masks.__init__

    def go_on(masks: Masks, *args: Any) -> None:
        begin(masks, *args)
        masks._grammars = made[-1]._grammars if made else masks._grammars
        made.append(masks)

    def ends() -> list[tuple[str | None, bool]]:
        """Of two requests, one after the other: how each ends, and whether with tokens."""
        made.clear()
        served = [(serve(model, [request(model, number, rules)]), number) for number in range(2)]
        return [(run.end(number).error, len(run.tokens(number)) > 3) for run, number in served]

    monkeypatch.setattr(Masks, "__init__", go_on)
    monkeypatch.setattr("engine.matcher._LIMITS", LLParserLimits(max_lexer_states=150))
    large = "the grammar: lexer error: too many states: 150 >= 150"
    assert ends() == [(large, True)] * 2
    monkeypatch.setattr(Masks, "_fail", lambda masks, state, error: masks._requests.fail(state.sequence, str(error)))
    assert ends() == [(large, True), (large, False)]


def test_an_aborted_request_leaves_nothing(model: Model) -> None:
    """Masks of a request that has ended are not kept."""
    scheduler, masks = masked_scheduler(model.vocabulary)
    masks.add(matching(model, 1, "a+"))
    assert masks._states
    assert masks.making
    scheduler.requests.abort(1, AbortReason.client_gone)
    masks.advance()
    assert not masks._states


def test_grammars_that_nobody_waits_for_are_not_compiled(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends before a thread has come to its grammar leaves it nothing to do; planted fault: it does."""

    def compiled() -> int:
        work = Later()
        scheduler, masks = masked_scheduler(model.vocabulary, work)
        for number in range(5):
            masks.add(matching(model, number, "a" * number + "b"))
        for number in range(1, 5):
            scheduler.requests.abort(number, AbortReason.client_gone)
        masks.advance()
        return work.begin()

    assert compiled() == 1
    monkeypatch.setattr(Future, "cancel", lambda future: False)
    assert compiled() == 5


def test_equal_grammars_are_compiled_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, and later requests with the same tools, share what was compiled, also where the first of them is aborted; the
    replies are as different as their seeds, and keep the grammar. What is kept is bounded; planted fault: nothing is."""
    texts: list[str] = []
    matcher = Vocabulary.matcher
    monkeypatch.setattr(Vocabulary, "matcher", lambda self, text: texts.append(text) or matcher(self, text))
    rules = Grammar(grammar(model.markers, json_answer(wanted(1)), Thought.none))
    served = serve(model, [request(model, number, rules) for number in range(12)])
    replies = [said(model, served.tokens(number), cut=False).content for number in range(12)]
    for reply in replies:
        jsonschema.validate(json.loads(reply), wanted(1))
    assert len(set(replies)) > 1
    assert texts == [rules.text]

    def kept() -> tuple[int, int]:
        work = Later()
        scheduler, masks = masked_scheduler(model.vocabulary, work)
        for number in range(10):
            masks.add(request(model, number, Grammar(f"start: {number // 2}")))
        scheduler.requests.abort(0, AbortReason.client_gone)
        for number in (8, 9):
            scheduler.requests.abort(number, AbortReason.client_gone)
        masks.advance()
        masks.add(request(model, 10, Grammar("start: 4")))
        return len(masks._grammars), work.begin()

    monkeypatch.setattr("engine.core.masks.GRAMMARS", 3)
    assert kept() == (3, 5)
    monkeypatch.setattr("engine.core.masks.GRAMMARS", 0)
    assert kept() == (0, 8)


def test_without_a_vocabulary_grammars_are_refused(model: Model) -> None:
    """Where the checkpoint has no tokenizer a request with a grammar is refused and counted, and others are served."""
    scheduler, masks = masked_scheduler(None)
    masks.add(request(model, 1, Grammar("x")))
    (output,) = scheduler.requests.drain()
    assert (output.invalid, scheduler.requests.counters.received, scheduler.requests.counters.refused) == (True, 1, 1)
    assert "grammars are not available" in (output.error or "")
