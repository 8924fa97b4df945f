"""How hard a model is to think, as OpenAI's APIs write it."""

from typing import Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # the model knows two: none, and all others


def thinks_by_effort(effort: Effort | None) -> bool | None:
    """Whether the model is to think; None: nothing is said."""
    return None if effort is None else effort != "none"
