"""Answers of Anthropic's Messages API.

    message_start
      content_block_start, content_block_delta ..., content_block_stop        for each block: thinking, text, tool_use
    message_delta, message_stop                                               or, after an error: error

A tool call that max_tokens cuts is left out of a whole answer, and ends a stream unfinished.
"""

import secrets
from typing import Any

import msgspec

from deploy.edge.answers.blocks import BlockFormat, encode, event
from deploy.edge.answers.response_format import ServedModel, Usage
from deploy.edge.anthropic.error_object import ANTHROPIC_ERROR
from deploy.edge.anthropic.message_request import MessagesRequest
from engine.errors import QuartetError
from engine.front.generation import ReplyBlock
from engine.front.value_schema import json_kind
from engine.protocol import JsonObject

SIGNATURE = "unsigned"  # clients want one, and send it back; nobody looks at it
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat(BlockFormat):
    def __init__(self, model: ServedModel, _: MessagesRequest) -> None:
        super().__init__()
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model

    def begin(self, usage: Usage) -> bytes:
        return event("message_start", message=self._message([], usage))

    def end(self, usage: Usage) -> bytes:
        return event("message_delta", delta=self._stopped(), usage=_counts(usage)) + event("message_stop")

    def failure(self, error: QuartetError) -> bytes:
        return b"event: error\ndata: " + encode(ANTHROPIC_ERROR.body(error)) + b"\n\n"

    def full(self, usage: Usage) -> bytes:
        blocks = [block for block in self.choice.blocks if block.kind != "call" or json_kind(block.text)]
        content = [_shown(block, block.text, msgspec.Raw(block.text.encode())) for block in blocks]
        return encode(self._message(content, usage) | self._stopped())

    def opened(self, block: ReplyBlock) -> bytes:
        return event("content_block_start", index=block.index, content_block=_shown(block, "", {}))

    def grown(self, block: ReplyBlock, text: str) -> bytes:
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: ReplyBlock) -> bytes:
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        if block.kind == "reasoning":
            before = event("content_block_delta", index=block.index, delta=signed)
        else:
            before = b""
        return before + event("content_block_stop", index=block.index)

    def _message(self, content: list[JsonObject], usage: Usage) -> JsonObject:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model.name, "content": content,
                "stop_reason": None, "stop_sequence": None, "usage": _counts(usage)}  # fmt: skip

    def _stopped(self) -> dict[str, str | None]:
        assert self.choice.finish is not None
        if isinstance(self.choice.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.choice.stop}
        return {"stop_reason": _REASONS[self.choice.finish], "stop_sequence": None}


def _counts(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _shown(block: ReplyBlock, text: str, arguments: Any) -> JsonObject:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
