"""One edge for all tests of a module: its script is reset before each."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import Nano
from tests.support.edge.http_edge import Edge, Edges


@pytest.fixture(scope="module")
def edges(nano: Nano) -> Iterator[Edges]:
    """Starts edges that serve a nano model; they end with the module."""
    with ExitStack() as stack:
        yield lambda member="31b", **options: stack.enter_context(Edge(nano(member), **options))


@pytest.fixture(scope="module")
def shared_edge(edges: Edges) -> Edge:
    return edges()


@pytest.fixture
def edge(shared_edge: Edge) -> Edge:
    shared_edge.reset()
    return shared_edge
