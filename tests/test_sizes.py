"""The code and its tests stay within their bounds, and what is counted as code is code."""

import pytest

from tests.support.repo_rules import sources
from tests.support.sizes import BOUNDS, CONSTRUCTOR, CodeSize, code_size, code_sizes, constructors, excesses

pytestmark = pytest.mark.pure


def test_the_code_is_no_larger_than_its_bounds() -> None:
    """Each room's tokens are within its bound; doubled, each is reported by name."""
    figures = code_sizes()
    assert excesses(figures) == []
    doubled = excesses({name: 2 * figure for name, figure in figures.items()})
    assert [line.partition(":")[0] for line in doubled] == list(BOUNDS)


def test_constructors_are_small() -> None:
    """None has more than CONSTRUCTOR tokens; one that has is found."""
    assert max(tokens for path in sources() for tokens in constructors(path.read_text()).values()) <= CONSTRUCTOR
    large = "class A:\n    def __init__(self):\n" + 84 * "        self.a\n"
    assert constructors(large) == {2: 6 + 84 * 3}


def test_only_code_is_counted() -> None:
    """Comments, blank lines and docstrings count nothing; a string over two lines is one token on two lines."""
    source = '"""Module\n\ndocstring."""\n\n# comment\nx = 1  # comment\n\n\ndef f():\n    """Says."""\n    return x\n'
    assert code_size(source) == CodeSize(lines=3, tokens=3 + 5 + 2)
    assert code_size(source + 'y = """a\nb"""\n') == CodeSize(lines=5, tokens=13)
