"""The runner of client scripts says of every case what became of it."""

import sys
import textwrap
from pathlib import Path

import pytest

from tests.clients.run import CLIENTS, ROOT, Target, ask

pytestmark = pytest.mark.pure

SCRIPT = """
import time
from tests.clients.cases import Server, case, expect, main

@case("good")
def good(server: Server) -> None:
    expect((server.base, server.model), ("http://here/v1", "m"))

@case("bad")
def bad(server: Server) -> None:
    expect(server.model, "another")

@case("also good")
async def also_good(server: Server) -> None:
    pass

@case("{last}")
def last(server: Server) -> None:
    {body}

@case("never begun")
def never_begun(server: Server) -> None:
    pass

main()
"""


def outcomes(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit_s: float = 20) -> dict[str, str | None]:
    (folder / "with_fake.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return dict(ask("with_fake", Path(sys.executable), folder, Target("http://here", "m", "none"), limit_s=limit_s))


@pytest.mark.parametrize(
    ("body", "limit_s", "reason"),
    [
        ("import os; os._exit(3)", 20, "no outcome: the script ended with exit code 3"),
        ("time.sleep(60)", 5.4, "no outcome: the script did not end within 5 s"),
    ],
)
def test_every_case_has_an_outcome(
    body: str, limit_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes is ok, what raises says why, and behind a script's death or hang nothing passes for ok."""
    found = outcomes(tmp_path, monkeypatch, SCRIPT.format(last="ends it", body=body), limit_s)
    bad = "AssertionError: 'm', not 'another'"
    assert found == {"good": None, "bad": bad, "also good": None, "ends it": reason, "never begun": reason}


def test_a_script_that_cannot_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row has the last thing that it said."""
    found = outcomes(tmp_path, monkeypatch, "import no_such_client")
    assert found == {"start": "the script ended with exit code 1: ModuleNotFoundError: No module named 'no_such_client'"}


def test_every_client_has_a_script() -> None:
    """The file that the runner would start is there."""
    for client in CLIENTS:
        assert (ROOT / Path(*client.module.split("."))).with_suffix(".py").is_file(), client.module
