"""Checks of grammars: each has its own time, whoever waits before it; verdicts are remembered, and the queue is bounded."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest

from engine.errors import InvalidRequest, Overloaded
from engine.front import grammar_check
from engine.front.grammar_check import GrammarCheck

pytestmark = pytest.mark.pure


SLOW_S = 0.2


class Compiler:
    """Compiles as a side process does. What begins with "wait" takes until `go`, "slow" a while; "wrong" cannot be kept, for "gone"
    there is no process."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def complaint(self, rules: str) -> str | None:
        self.compiled.append(rules)
        if rules.startswith("wait"):
            self.entered.set()
            assert self.go.wait(20)
        if rules.startswith("slow"):
            self.go.wait(SLOW_S)
        if rules.startswith("gone"):
            raise Overloaded("no process")
        return "no such rule" if rules.startswith("wrong") else None


def checked(run: Callable[[GrammarCheck, Compiler], Coroutine[Any, Any, None]]) -> Compiler:
    """Runs a case; what was compiled."""
    compiler = Compiler()
    check = GrammarCheck(compiler.complaint)
    try:
        asyncio.run(run(check, compiler))
    finally:
        compiler.go.set()
    return compiler


def outcomes(found: list[Any]) -> list[str]:
    return [type(each).__name__ for each in found]


def test_who_waits_behind_others_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once, which together take longer than one may wait for its turn, a few at a time: all of them are let in. Planted:
    one at a time, they are not."""
    monkeypatch.setattr(grammar_check, "QUEUE_S", 3.5 * SLOW_S)

    async def run(check: GrammarCheck, _: Compiler) -> None:
        found.extend(await asyncio.gather(*(check.check(f"slow {at}", "regex", "one") for at in range(6)), return_exceptions=True))

    found = []
    checked(run)
    assert outcomes(found) == ["NoneType"] * 6
    monkeypatch.setattr(grammar_check, "_AT_ONCE", 1)
    found.clear()
    checked(run)
    assert "Overloaded" in outcomes(found)


def test_those_that_take_long_hold_up_no_others() -> None:
    """Others are compiled beside three that do not end."""

    async def run(check: GrammarCheck, compiler: Compiler) -> None:
        waiting = [asyncio.create_task(check.check(f"wait {at}", "regex", "one")) for at in range(3)]
        await check.check("fine", "regex", "one")
        assert not any(each.done() for each in waiting)
        compiler.go.set()
        await asyncio.gather(*waiting)

    checked(run)


def test_verdicts_are_remembered() -> None:
    """Of several that ask for the same at once one compiles it, also where it cannot be kept; not that nobody could compile it."""

    async def run(check: GrammarCheck, _: Compiler) -> None:
        asked = (check.check(rules, "regex", "one") for rules in ["wrong", "fine"] * 3)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert outcomes(found) == ["InvalidRequest", "NoneType"] * 3
        with pytest.raises(InvalidRequest, match="regex: no such rule"):
            await check.check("wrong", "regex", "one")
        for _ in range(2):
            with pytest.raises(Overloaded, match="no process"):
                await check.check("gone", "regex", "one")

    assert sorted(checked(run).compiled) == ["fine", "gone", "gone", "wrong"]


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than so many the one that was asked for longest ago is forgotten, and compiled again."""
    monkeypatch.setattr(grammar_check, "_REMEMBERED", 2)

    async def run(check: GrammarCheck, _: Compiler) -> None:
        for rules in ("a", "b", "a", "c", "a", "b"):
            await check.check(rules, "regex", "one")
            assert len(check._verdicts) <= 2

    assert checked(run).compiled == ["a", "b", "c", "b"]


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait, and who waits for too long, are refused as overload, and nothing of them stays."""
    monkeypatch.setattr(grammar_check, "_WAITING", 2)
    monkeypatch.setattr(grammar_check, "QUEUE_S", 0.1)
    monkeypatch.setattr(grammar_check, "_AT_ONCE", 1)

    async def run(check: GrammarCheck, compiler: Compiler) -> None:
        first = asyncio.create_task(check.check("wait", "regex", "one"))
        await asyncio.to_thread(compiler.entered.wait, 20)
        found = await asyncio.gather(*(check.check(f"{at}", "regex", "one") for at in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [Overloaded] * 3
        compiler.go.set()
        await first
        monkeypatch.setattr(grammar_check, "QUEUE_S", 20)
        await check.check("fine", "regex", "one")

    assert checked(run).compiled == ["wait", "fine"]


@pytest.mark.parametrize("fault", [False, True])
def test_a_client_with_many_grammars_stops_no_other(fault: bool) -> None:
    """Four that do not end, and more that wait: another client's is compiled at once, also one that the first has waiting.
    Planted: both are the same client."""

    async def run(check: GrammarCheck, compiler: Compiler) -> None:
        many = [asyncio.create_task(check.check(f"wait {at}", "regex", "many")) for at in range(8)]
        many.append(asyncio.create_task(check.check("fine", "regex", "many")))
        await asyncio.to_thread(compiler.entered.wait, 20)
        with pytest.raises(TimeoutError) if fault else nullcontext():
            async with asyncio.timeout(1 if fault else 20):
                await check.check("fine", "regex", "many" if fault else "few")
        compiler.go.set()
        await asyncio.gather(*many)

    checked(run)
