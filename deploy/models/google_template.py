"""Recognises Google's older chat templates for Gemma 4 by their constructs.

On 2026-07-09 Google replaced all of them. Older ones mishandle tool loops, consecutive replies,
null arguments, and thoughts between calls.
"""

CORRECTED = "2026-07-09"
_GOOGLES = ("macro format_function_declaration(", "macro strip_thinking(")
_LOOKS_AHEAD = "next_nt.found"  # whether a message that is no tool's follows: what decides now if a turn is closed


def is_outdated(template: str) -> bool:
    """Whether it is Google's from before CORRECTED, or derived from one."""
    return all(macro in template for macro in _GOOGLES) and _LOOKS_AHEAD not in template
