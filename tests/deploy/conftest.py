"""One edge for all tests of a module: its script is reset before each."""

from collections.abc import Iterator

import pytest

from tests.conftest import Nano
from tests.support.edge.http_edge import Edge


@pytest.fixture(scope="module")
def shared_edge(nano: Nano) -> Iterator[Edge]:
    with Edge(nano("31b")) as edge:
        yield edge


@pytest.fixture
def edge(shared_edge: Edge) -> Edge:
    shared_edge.reset()
    return shared_edge
