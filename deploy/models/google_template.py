"""Which of Google's chat templates for Gemma 4 a text is, seen by its constructs: copies differ in comments and white space.

On 2026-07-09 Google replaced the templates of all five sizes. Before, a turn was closed without a look at what follows, so that
tool loops and consecutive replies left turns open or closed twice; null arguments were written as Python's None; and thoughts were
lost between calls.
"""

from typing import Literal

Edition = Literal["corrected", "older"]
CORRECTED = "2026-07-09"
_GOOGLES = ("macro format_function_declaration(", "macro strip_thinking(")
_LOOKS_AHEAD = "next_nt.found"  # whether a message that is no tool's follows: what decides now if a turn is closed


def edition(template: str) -> Edition | None:
    """None: the template is not Google's, nor made from it."""
    if not all(macro in template for macro in _GOOGLES):
        return None
    return "corrected" if _LOOKS_AHEAD in template else "older"
