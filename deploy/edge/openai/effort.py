"""How hard a model is to think, as OpenAI's APIs write it."""

from engine.errors import InvalidRequest

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # the model knows two: none, and all others


def thinks_by_effort(effort: str | None, key: str) -> bool | None:
    """Whether the model is to think; None: nothing is said."""
    if effort is None:
        return None
    if effort not in REASONING_EFFORTS:
        raise InvalidRequest(f"{key}: not one of {', '.join(REASONING_EFFORTS)}", param=key)
    return effort != "none"
