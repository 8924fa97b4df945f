"""Which of Google's chat templates a folder carries."""

import pytest

from deploy.models.google_template import is_outdated
from deploy.models.nano import TRAINED

pytestmark = pytest.mark.pure

# Written here in the form of Google's: the macros that all editions have, and how a turn is closed before and since 2026-07-09.
MACROS = "{%- macro format_function_declaration(tool) -%}{%- endmacro -%}{%- macro strip_thinking(text) -%}{%- endmacro -%}"
BEFORE = "{%- if not (message['tool_responses'] and not message['content']) -%}<turn|>{%- endif -%}"
SINCE = "{%- elif not (ns_tr_out.flag and not has_content and not next_nt.found) -%}<turn|>{%- endif -%}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (MACROS + SINCE, False),
        ("{#- Published: 2026-07-09 -#}" + MACROS + SINCE, False),
        (MACROS + BEFORE, True),
        (MACROS + "{%- set preserve_thinking = preserve_thinking | default(false) -%}" + BEFORE, True),
        (SINCE, False),
        ("{{ messages[0].content }}", False),
    ],
)
def test_editions_are_told_apart(template: str, expected: bool) -> None:
    """By the scan for the next message, whatever comments say; vLLM's example, which has preserve_thinking, is of before."""
    assert is_outdated(template) == expected


@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_nanos_is_not_googles(member: str) -> None:
    """The nano checkpoints have a template of their own."""
    assert not is_outdated((TRAINED / member / "chat_template.jinja").read_text())
