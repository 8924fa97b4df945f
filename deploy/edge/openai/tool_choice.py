"""tool_choice of OpenAI's APIs. Responses writes the contents of `function` and `allowed_tools` one
level higher."""

from typing import Any

from deploy.edge.bodies.raw_json import ANYTHING, Json, invalid, read_small
from engine.front.constraints import ToolChoice

_MAX_BYTES = 64 << 10


def tool_choice(raw: Json, *, parallel: bool) -> ToolChoice:
    """`parallel` allows several calls. InvalidRequest names the fault."""
    match read_small(raw, "tool_choice", ANYTHING, _MAX_BYTES):
        case (None | "none" | "auto" | "required") as mode:
            return ToolChoice(mode or "auto", one=not parallel)
        case {"type": "function"} as function:
            return ToolChoice("required", (_name(function),), one=True)
        case {"type": "allowed_tools", **allowed}:
            match allowed.get("allowed_tools", allowed):
                case {"mode": ("auto" | "required") as mode, "tools": [*tools]}:
                    return ToolChoice(mode, tuple(dict.fromkeys(map(_name, tools))), one=not parallel)
    raise invalid("tool_choice", "must be none, auto, required, a function by its name, or allowed_tools with a mode and tools")


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise invalid("tool_choice", "only functions by their names")
