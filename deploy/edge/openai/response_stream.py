"""Answers of OpenAI's Responses API.

    response.created, response.in_progress
      for each item: response.output_item.added, (response.content_part.added,) ....delta ..., ....done, response.output_item.done
    response.completed, response.incomplete after max_output_tokens, or response.failed after an error

Items are message, reasoning and function_call. One that max_output_tokens cuts is incomplete.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import count, groupby

from msgspec import UNSET
from msgspec.structs import replace

from deploy.edge.answers.blocks import BlockFormat, encode, event
from deploy.edge.answers.response_format import ServedModel, Usage
from deploy.edge.bodies.raw_json import copied
from deploy.edge.http.error_response import message_of
from deploy.edge.http.http_errors import status_of
from deploy.edge.openai.response_request import DeclaredTool, OfferedFunction, ResponsesRequest, encrypted_content_of
from engine.errors import QuartetError
from engine.front.generation import ReplyBlock
from engine.front.value_schema import json_kind
from engine.protocol import JsonObject

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_NO_STATE: JsonObject = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}


class ResponseObject(BlockFormat):
    def __init__(self, model: ServedModel, request: ResponsesRequest) -> None:
        super().__init__()
        self._number = secrets.token_hex(12)
        self.id = f"resp_{self._number}"
        self._created = int(time.time())
        functions = request.functions()
        self._about = {"model": model.name, **_NO_STATE, **_repeated(request, functions)}
        self._is_sealed = request.includes_encrypted()
        self._namespaced = {
            function.name: {"name": function.tool.name, "namespace": function.namespace.name}
            for function in functions
            if function.namespace is not None
        }
        self._sequence = count()
        self._delta = b""  # of the open block, whose deltas differ by their number and text alone

    def begin(self, usage: Usage) -> bytes:  # noqa: ARG002 - what it costs is said at the end
        shown = self._response("in_progress")
        return self._event("response.created", response=shown) + self._event("response.in_progress", response=shown)

    def end(self, usage: Usage) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, error: QuartetError) -> bytes:
        status = status_of(error)
        code = {429: "rate_limit_exceeded"}.get(status.status, "server_error" if status.status >= 500 else "invalid_prompt")
        failed = self._response("failed") | {"error": {"code": code, "message": message_of(error)}}
        return self._event("response.failed", response=failed)

    def full(self, usage: Usage) -> bytes:
        return encode(self._response(self._status(), usage))

    def opened(self, block: ReplyBlock) -> bytes:
        kind = f"response.{_EVENTS[block.kind]}.delta".encode()
        where = encode(self._event_location(block))[1:-1]
        self._delta = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%%d,"delta":%%b}\n\n' % (kind, kind, where)
        item = self._item(block, "in_progress") | ({} if block.kind == "call" else {"content": []})
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._part_event("added", block, "")

    def grown(self, block: ReplyBlock, text: str) -> bytes:  # noqa: ARG002 - `_delta` knows it
        return self._delta % (next(self._sequence), encode(text))

    def closed(self, block: ReplyBlock) -> bytes:
        status = self._status_of(block)
        match block.kind:
            case "call" if status == "incomplete":
                done = b""  # its arguments never were
            case "call":
                done = self._done_event(block, arguments=block.text, name=self._called(block)["name"])
            case _:
                done = self._done_event(block, text=block.text) + self._part_event("done", block, block.text)
        return done + self._event("response.output_item.done", output_index=block.index, item=self._item(block, status))

    def _event(self, kind: str, **fields: object) -> bytes:
        return event(kind, sequence_number=next(self._sequence), **fields)

    def _done_event(self, block: ReplyBlock, **fields: object) -> bytes:
        return self._event(f"response.{_EVENTS[block.kind]}.done", **self._event_location(block), **fields)

    def _event_location(self, block: ReplyBlock) -> JsonObject:
        return self._location(block) | ({"logprobs": []} if block.kind == "text" else {})

    def _location(self, block: ReplyBlock) -> JsonObject:
        item = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind == "call":
            return item
        return item | {"content_index": 0}

    def _part_event(self, what: str, block: ReplyBlock, text: str) -> bytes:
        return self._event(f"response.content_part.{what}", **self._location(block), part=_part(block, text))

    def _item_id(self, block: ReplyBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._number}{block.index:02x}"

    def _item(self, block: ReplyBlock, status: str) -> JsonObject:
        about = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "text":
                return about | {"type": "message", "role": "assistant", "content": [_part(block, block.text)]}
            case "reasoning":
                seal = encrypted_content_of(block.text) if self._is_sealed and status != "in_progress" else None
                content = [_part(block, block.text)]
                return about | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": seal}
            case "call":
                return about | {"type": "function_call", "call_id": block.id, **self._called(block), "arguments": block.text}

    def _called(self, block: ReplyBlock) -> JsonObject:
        return self._namespaced.get(block.name, {"name": block.name})

    def _status(self) -> str:
        if self.choice.finish == "length":
            return "incomplete"
        return "completed"

    def _status_of(self, block: ReplyBlock) -> str:
        if self.choice.finish not in (None, "length") or block is not self.choice.blocks[-1]:
            return "completed"
        if block.kind == "call" and json_kind(block.text):
            return "completed"
        return "incomplete"

    def _response(self, status: str, usage: Usage | None = None) -> JsonObject:
        is_over = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block, self._status_of(block)) for block in self.choice.blocks] if is_over else [],
            "usage": None if usage is None else _counts(usage),
            **self._about,
        }


def _repeated(request: ResponsesRequest, functions: Iterable[OfferedFunction]) -> JsonObject:
    return {
        "metadata": request.metadata or {},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tools": [tool for group in groupby(functions, lambda function: function.namespace) for tool in _declared(*group)],
        "tool_choice": copied(request.tool_choice) or "auto",
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "text": {"format": (request.text and copied(request.text.format)) or {"type": "text"}},
    }


def _declared(namespace: DeclaredTool | None, functions: Iterable[OfferedFunction]) -> Sequence[DeclaredTool | JsonObject]:
    tools = [replace(tool, parameters=copied(tool.parameters), tools=UNSET) for tool in (function.tool for function in functions)]
    if namespace is None:
        return tools
    return [{"type": "namespace", "name": namespace.name, "description": namespace.description or "", "tools": tools}]


def _counts(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0, **usage.media},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _part(block: ReplyBlock, text: str) -> JsonObject:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
