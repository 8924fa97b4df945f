"""Whether a text is one of Google's older chat templates for Gemma 4, by its constructs: copies differ in comments and white space.

On 2026-07-09 Google replaced the templates of all five sizes. Before, a turn was closed without a look at what follows, so that
tool loops and consecutive replies left turns open or closed twice; null arguments were written as Python's None; and thoughts were
lost between calls.
"""

CORRECTED = "2026-07-09"
_GOOGLES = ("macro format_function_declaration(", "macro strip_thinking(")
_LOOKS_AHEAD = "next_nt.found"  # whether a message that is no tool's follows: what decides now if a turn is closed


def is_outdated(template: str) -> bool:
    """Whether it is Google's from before CORRECTED, or made from such a one."""
    return all(macro in template for macro in _GOOGLES) and _LOOKS_AHEAD not in template
