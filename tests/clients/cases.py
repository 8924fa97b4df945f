"""What a client's script is made of: cases, each a function that raises unless it gets what it asked for. Standard library only.

A script runs in the client's own environment, as `python -m tests.clients.with_NAME --url URL --model NAME --report FILE`. The
report has a line of JSON for the list of cases, and one for each that has ended.
"""

import argparse
import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_S = 60  # the longest that a client waits for one answer
WEATHER = "What is the weather in Paris?"
RESULT = "sunny, 21 degrees"
ANSWER = "The weather in Paris is sunny, 21 degrees."
SUM = "What is 472 + 389?"
SUMMED = "472 + 389 = 861"
ABOUT_ANNA = "Anna is 33 years old, works as a baker and lives in Paris. As JSON: name, city."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALLED = ("get_weather", {"city": "Paris"})  # what the model makes of WEATHER with TOOL


@dataclass(frozen=True)
class Server:
    """Where the server listens, without a path; and the model's name there."""

    url: str
    model: str

    @property
    def base(self) -> str:
        """What OpenAI's clients call base_url."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """The API key, from where OpenAI's client finds it."""
        return os.environ["OPENAI_API_KEY"]


Case = Callable[[Server], Any]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Make a function, which may be a coroutine function, a case of this script."""

    def added(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return added


def expect(got: Any, wanted: Any) -> None:
    """AssertionError that shows both."""
    assert got == wanted, f"{got!r}, not {wanted!r}"


def raised(kind: type[Exception], function: Callable[[], Any]) -> Any:
    """The error of this kind that the function must raise."""
    try:
        got = function()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised; got {got!r}")


def main() -> None:
    """Run every case, whatever the others do; exit code 0 unless the script itself is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--report", required=True, type=Path)
    args = parser.parse_args()
    server = Server(args.url, args.model)
    with args.report.open("w") as report:
        _write(report, {"cases": list(CASES)})
        for name, function in CASES.items():
            began = time.monotonic()
            reason = _outcome(function, server)
            _write(report, {"case": name, "reason": reason, "seconds": round(time.monotonic() - began, 2)})


def _outcome(function: Case, server: Server) -> str | None:
    """Why it failed; None: it did not."""
    try:
        result = function(server)
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except Exception as error:  # noqa: BLE001 - any error of a client is the case's outcome
        sys.excepthook(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}"
    return None


async def _awaited(result: Any) -> Any:
    return await result


def _write(report: Any, line: dict[str, Any]) -> None:
    report.write(json.dumps(line) + "\n")
    report.flush()
