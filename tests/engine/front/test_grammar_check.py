"""Checks of grammars: each has its own time, whoever waits before it; verdicts are remembered, and the queue is bounded."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from engine.errors import InvalidRequest, Overloaded
from engine.front import grammar_check
from engine.front.grammar_check import GrammarCheck
from engine.matcher import Vocabulary

pytestmark = pytest.mark.pure


SLOW_S = 0.2


class Compiler:
    """In place of a vocabulary. A grammar that begins with "wait" takes until `go`, "slow" a while; "wrong" cannot be kept."""

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
        return "no such rule" if rules.startswith("wrong") else None


def checked(run: Callable[[GrammarCheck, Compiler], Coroutine[Any, Any, None]]) -> Compiler:
    """Runs a case; what was compiled."""
    compiler = Compiler()
    check = GrammarCheck(lambda: cast("Vocabulary", compiler))
    try:
        asyncio.run(run(check, compiler))
    finally:
        compiler.go.set()
        check._pool.shutdown()
    return compiler


def outcomes(found: list[Any]) -> list[str]:
    return [type(each).__name__ for each in found]


def test_who_waits_behind_others_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once, which together take longer to compile than one may: all of them are let in."""
    monkeypatch.setattr(grammar_check, "COMPILE_S", 5 * SLOW_S)

    async def run(check: GrammarCheck, _: Compiler) -> None:
        found = await asyncio.gather(*(check.check(f"slow {at}", "regex") for at in range(6)), return_exceptions=True)
        assert outcomes(found) == ["NoneType"] * 6

    checked(run)


def test_one_that_takes_too_long_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 400 of its own, and others are compiled beside it; once such grammars have all threads, others may come later."""
    monkeypatch.setattr(grammar_check, "COMPILE_S", 1.0)

    async def run(check: GrammarCheck, compiler: Compiler) -> None:
        rules = ["wait 1", "fine 1", "wait 2", "wait 3", "fine 2", "wait 4", "fine 3"]
        found = await asyncio.gather(*(check.check(each, "regex") for each in rules), return_exceptions=True)
        assert outcomes(found) == [{"w": "InvalidRequest", "f": "NoneType"}[each[0]] for each in rules[:-1]] + ["Overloaded"]
        assert "takes longer than" in str(found[0])
        compiler.go.set()
        monkeypatch.setattr(grammar_check, "COMPILE_S", 20)
        await check.check("fine 3", "regex")

    checked(run)


def test_verdicts_are_remembered() -> None:
    """Of several that ask for the same at once one compiles it, also where it cannot be kept."""

    async def run(check: GrammarCheck, _: Compiler) -> None:
        found = await asyncio.gather(*(check.check(rules, "regex") for rules in ["wrong", "fine"] * 3), return_exceptions=True)
        assert outcomes(found) == ["InvalidRequest", "NoneType"] * 3
        with pytest.raises(InvalidRequest, match="regex: no such rule"):
            await check.check("wrong", "regex")

    assert sorted(checked(run).compiled) == ["fine", "wrong"]


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than so many the one that was asked for longest ago is forgotten, and compiled again."""
    monkeypatch.setattr(grammar_check, "_REMEMBERED", 2)

    async def run(check: GrammarCheck, _: Compiler) -> None:
        for rules in ("a", "b", "a", "c", "a", "b"):
            await check.check(rules, "regex")
            assert len(check._verdicts) <= 2

    assert checked(run).compiled == ["a", "b", "c", "b"]


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait, and who waits for too long, are refused as overload, and nothing of them stays."""
    monkeypatch.setattr(grammar_check, "_WAITING", 2)
    monkeypatch.setattr(grammar_check, "QUEUE_S", 0.1)

    async def run(check: GrammarCheck, compiler: Compiler) -> None:
        first = asyncio.create_task(check.check("wait", "regex"))
        await asyncio.to_thread(compiler.entered.wait, 20)
        found = await asyncio.gather(*(check.check(f"{at}", "regex") for at in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [Overloaded] * 3
        compiler.go.set()
        await first
        monkeypatch.setattr(grammar_check, "QUEUE_S", 20)
        await check.check("fine", "regex")

    assert checked(run).compiled == ["wait", "fine"]
