"""README's first requests, as a shell runs them: curl sends each to an edge, which serves it."""

import re
import shutil
import subprocess

import pytest

from engine.adapters import NO_ADAPTER
from tests.support.edge.http_edge import Edge, Edges
from tests.support.repo_rules import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(shutil.which("curl") is None, reason="curl is absent")]

REQUESTS = re.findall(r"^```\n(curl .*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def edge(edges: Edges) -> Edge:
    return edges(max_len=4096, media=frozenset({"image"}), adapters={"polite": "/adapters/polite"})


def asked(edge: Edge, command: str) -> str:
    """The reply to a command of the README, which names `make serve`'s address and model."""
    here = command.replace("http://127.0.0.1:8000", edge.url).replace('"nano-31b"', f'"{edge.name}"')
    done = subprocess.run(["bash", "-c", here], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_each_request_reaches_the_engine(edge: Edge) -> None:
    """The sum streams and ends, the same is asked of the adapter, and the picture arrives as one item."""
    streamed, adapted, pictured = REQUESTS
    assert asked(edge, streamed).rstrip().endswith("data: [DONE]")
    assert "472 + 389" in edge.prompt_text(-1)
    assert edge.core.requests[-1].adapter == NO_ADAPTER
    assert '"model":"polite"' in asked(edge, adapted)
    assert edge.core.requests[-1].adapter == 0
    assert "472 + 389" in edge.prompt_text(-1)
    assert '"chat.completion"' in asked(edge, pictured)
    assert [item.kind for item in edge.core.requests[-1].media] == ["image"]


def test_a_request_that_is_spelled_wrong_is_refused(edge: Edge) -> None:
    for command in REQUESTS:
        served = len(edge.core.requests)
        assert '"error"' in asked(edge, command.replace('"messages"', '"mesages"'))
        assert '"error"' in asked(edge, re.sub('"(nano-31b|polite)"', '"nano-32b"', command))
        assert len(edge.core.requests) == served
