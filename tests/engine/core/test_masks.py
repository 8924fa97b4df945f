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

from engine.core.loop import Intake
from engine.core.masks import GrammarCompiler, Masks
from engine.core.scheduler import Scheduler
from engine.errors import GenerationFailed
from engine.front.call_grammar import CallGrammar
from engine.front.generation import Choice
from engine.front.grammar import Thought, begun_call, choice_answer, grammar, json_answer, regex_answer
from engine.front.reply import Markers, ReplyParser
from engine.front.text import TextProcessor
from engine.front.tools import NO_TOOLS, Tools
from engine.matcher import Matcher, Vocabulary
from engine.plan import ROW_MASKED
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Grammar, ThoughtBudget
from engine.step_masks import allows
from tests.conftest import Nano
from tests.support.engine.answers import AtOnce
from tests.support.engine.masked_serving import GROUPS, MAX_LEN, PAGES, MaskedRun, Model, request, serve
from tests.support.engine.scheduling import SchedulerConfig, scheduler_of
from tests.support.engine.schemas import members, tools_of
from tests.support.engine.walker import choice_of

pytestmark = pytest.mark.pure

TIGHT = (60, 56)


@pytest.fixture(scope="module")
def model(nano: Nano) -> Model:
    text = TextProcessor.load(nano("31b"))
    markers = Markers.of(text)
    return Model(text, Vocabulary(text.pieces, text.eos_ids, text.vocab_size), markers)


class Later(Executor):
    """In place of a pool whose threads are busy."""

    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        self._futures.append(Future())
        return self._futures[-1]

    def end_first(self) -> None:
        """A thread ends the first of what was submitted, with nothing that anybody reads."""
        self._futures.pop(0).set_exception(GenerationFailed("of no interest"))


def said(model: Model, tokens: list[int], *, cut: bool, tools: Tools = NO_TOOLS) -> Choice:
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


def test_a_wrong_mask_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: no row gets its mask. Hardly a reply is valid, and those that break their grammar end in error."""
    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    encoded = Masks._encoded
    monkeypatch.setattr(Masks, "_encoded", lambda masks, step, made: encoded(masks, step, {}))
    served = serve(model, json_requests(model, COUNT))
    assert len(valid_json(model, served, COUNT)) <= 2
    assert sum(output.finish is FinishReason.error for output in served.outputs) >= 8


@pytest.mark.parametrize("pages", [PAGES, TIGHT])
def test_calls_behind_a_trigger_keep_their_schemas(model: Model, pages: tuple[int, ...]) -> None:
    """auto: text is free; every call that the model begins names a tool and keeps its schema, and text goes on behind it."""
    schemas = {name: wanted(at) for at, name in enumerate(("get_weather", "run-it"))}
    tools, rules = tools_of(schemas), calls_of(model, schemas)
    served = serve(model, [request(model, at, rules) for at in range(12)], pages=pages)
    calls = texts = 0
    for at in range(12):
        choice = said(model, served.tokens(at), cut=True, tools=tools)
        assert served.end(at).finish is FinishReason.length
        ended = served.tokens(at).count(model.markers.end_call)
        for call in choice.calls[:ended]:
            jsonschema.validate(json.loads(call.text), schemas[call.name])
        calls += ended
        texts += bool(choice.content)
    assert calls > 40
    assert texts == 12


def not_taken_back(matcher: Matcher, drafts: list[int], masks: np.ndarray, until: float) -> int:
    """Planted fault: the drafts that masks were made behind stay in the matcher."""
    for at, token in enumerate(drafts, 1):
        if not allows(masks[at - 1], token):
            return at - 1
        matcher.inner.consume_token(token)
        matcher.fill(masks[at])
    return len(drafts)


def test_calls_are_drafted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text as in calls rows have drafts. What a row gave behind a trigger is dropped, and its position runs again as a decode
    row: no step has a chunk for it. Behind a call's end tokens are free: the tokens are those without drafts, in fewer steps,
    whether all are guessed or few. Planted fault: drafts stay in the matcher. The machine's speed decides nothing."""
    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("engine.core.masks.SLOW_S", 1e9)
    rules = calls_of(model, {"get_weather": wanted(0)})
    asked = [request(model, at, rules) for at in range(5)]

    def tokens(run: MaskedRun) -> list[list[int]]:
        return [run.tokens(at) for at in range(5)]

    plain = serve(model, asked, pages=(PAGES[0], 400))
    assert plain.prefill == sum(len(one.tokens) for one in asked)
    few, served = serve(model, asked, drafts=3), serve(model, asked, drafts=3, known=plain.known)
    assert tokens(few) == tokens(served) == tokens(plain)
    assert served.steps < 0.4 * plain.steps < 0.8 * few.steps
    assert sum(each.count(model.markers.begin_call) for each in tokens(served)) > 5
    for flags in (0, ROW_MASKED):
        assert [row.width for row in served.rows if row.flags == flags].count(4) > 50
    monkeypatch.setattr(Matcher, "fill_ahead", not_taken_back)
    assert tokens(serve(model, asked, drafts=3, known=plain.known)) != tokens(plain)


LABEL = 2


def thinking(model: Model, number: int, budget: int, rules: Grammar | None = None) -> GenerateRequest:
    """A request whose thoughts may have so many tokens."""
    asked, markers = request(model, number, rules, 120), model.markers
    thought = ThoughtBudget(budget, markers.begin_thought, markers.end_thought, LABEL, markers.begin_call, None)
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


def test_a_budget_holds_in_every_step(model: Model) -> None:
    """The end of a thought costs no step: its mask is made while the forward of its step runs."""
    served = serve(model, [thinking(model, at, 5) for at in range(4)], marks=(model.markers.begin_thought,))
    assert all(thoughts(model, served.tokens(at)) for at in range(4))
    assert {gap for at in range(4) for gap in gaps(served.given[at])} == {1}


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
    longest = max(len("thought\n"), LABEL + budget)  # the grammar allows no end inside the label, whose characters may be tokens
    assert [served.end(at).finish for at in range(0, 12, 2)] == ["stop"] * 6
    assert all(thoughts(model, served.tokens(at))[0] <= longest for at in range(0, 12, 2))
    assert any(thoughts(model, free.tokens(at))[0] > longest for at in range(0, 12, 2))


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
    masks._compiler._threads = compiler or masks._compiler._threads
    masks._compiler._most = 1
    return scheduler, masks


def matching(model: Model, number: int, pattern: str) -> GenerateRequest:
    """A request whose reply matches a regular expression."""
    return request(model, number, Grammar(grammar(model.markers, regex_answer(pattern), Thought.none)))


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
    made = []
    begin = Masks.__init__

    def go_on(masks: Masks, *args: Any) -> None:
        begin(masks, *args)
        masks._compiler = made[-1]._compiler if made else masks._compiler
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


def test_equal_grammars_are_compiled_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, and later requests with the same tools, share what was compiled, also where the first of them is aborted; the
    replies are as different as their seeds, and keep the grammar. What is kept is bounded; planted fault: nothing is."""
    texts = []
    matcher = Vocabulary.matcher
    monkeypatch.setattr(Vocabulary, "matcher", lambda self, text: texts.append(text) or matcher(self, text))
    rules = Grammar(grammar(model.markers, json_answer(wanted(1)), Thought.none))
    served = serve(model, [request(model, number, rules) for number in range(12)])
    replies = [said(model, served.tokens(number), cut=False).content for number in range(12)]
    for reply in replies:
        jsonschema.validate(json.loads(reply), wanted(1))
    assert len(set(replies)) > 1
    assert texts == [rules.text]

    monkeypatch.setattr("engine.core.masks.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(GrammarCompiler, "_compiled", lambda _, text: texts.append(text))

    def kept() -> tuple[int, list[str]]:
        scheduler, masks = masked_scheduler(model.vocabulary)
        texts.clear()
        for number in (0, 0, 1, 1, 2, 3, 0, 3):
            Intake(scheduler.requests, masks).add(request(model, len(scheduler.requests.unfinished), Grammar(f"{number}")))
        return len(masks._compiler._grammars), texts

    monkeypatch.setattr("engine.core.masks.GRAMMARS", 3)
    assert kept() == (3, ["0", "1", "2", "3", "0"])
    monkeypatch.setattr("engine.core.masks.GRAMMARS", 9)
    assert kept() == (4, ["0", "1", "2", "3"])


@pytest.mark.parametrize("fault", [False, True])
def test_clients_take_turns_at_the_compiler(model: Model, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """Beside a client with many grammars another's is the next to be compiled, then each has its turn; what a client has no request
    for any more is not compiled. Planted: all are of one client."""
    threads, texts = Later(), []
    submit = threads.submit
    monkeypatch.setattr(threads, "submit", lambda work, text: texts.append(text) or submit(work, text))
    scheduler, masks = masked_scheduler(model.vocabulary, threads)
    for number, client in enumerate("aaaaaabbca"):
        asked = request(model, number, Grammar(f"{client}{number}"))
        Intake(scheduler.requests, masks).add(msgspec.structs.replace(asked, client="" if fault else client))
    scheduler.requests.abort(2, AbortReason.client_gone)
    for _ in range(9):
        threads.end_first()
        masks.advance()
    wanted_order = ["a0", "b6", "c8", "a1", "b7", "a3", "a4", "a5", "a9"]
    assert (texts == wanted_order) != fault
    assert sorted(texts) == sorted(wanted_order)
    for number in range(10):
        scheduler.requests.abort(number, AbortReason.client_gone)
    masks.advance()
    assert not masks._compiler._turns


def test_without_a_vocabulary_grammars_are_refused(model: Model) -> None:
    """Where the checkpoint has no tokenizer a request with a grammar is refused and counted, and others are served."""
    scheduler, masks = masked_scheduler(None)
    Intake(scheduler.requests, masks).add(request(model, 1, Grammar("x")))
    (output,) = scheduler.requests.drain()
    assert (output.invalid, scheduler.requests.counters.received, scheduler.requests.counters.refused) == (True, 1, 1)
    assert "grammars are not available" in (output.error or "")
