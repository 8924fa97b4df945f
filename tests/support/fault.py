"""What `tests.support.mutation` plants."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `file`, and becomes `new`. `id` says what goes wrong then.

    tests     files below tests/, nearest first;   survives  why none of them can see it
    """

    id: str
    file: str
    old: str
    new: str
    tests: str
    survives: str = ""
