"""An error in OpenAI's shape, as a reply's body or as a stream's last event.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from typing import Any

from deploy.edge.error_response import ErrorFields, ErrorShape


def _body(error: ErrorFields) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


OPENAI_ERROR = ErrorShape("Error", ("message", "type", "param", "code"), _body)
