"""Streams added up as their APIs' clients do it, with what must hold of the order of their events."""

import json
from typing import Any


def sse(body: str | bytes) -> list[dict[str, Any]]:
    """The data of every event but [DONE]; one that has a name is named as its data is."""
    found = []
    text = body if isinstance(body, str) else body.decode()
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.rpartition("\n")
        assert data.startswith("data: "), block
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == (f"event: {found[-1]['type']}" if "type" in found[-1] else "")
    return found


def sum_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one choice: content, reasoning by both names, calls as [id, name, arguments], and how it ended."""
    found = {"content": "", "reasoning_content": "", "reasoning": "", "calls": [], "finish": None}
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        assert found["finish"] is None, "nothing comes behind the end"
        delta = choice["delta"]
        for key in ("content", "reasoning_content", "reasoning"):
            found[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(found["calls"])
                assert call["type"] == "function"
                found["calls"].append([call["id"], call["function"]["name"], ""])
            found["calls"][call["index"]][2] += call["function"]["arguments"]
        found["finish"] = choice["finish_reason"]
    return found


def sum_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Anthropic's: every block is opened, grown and closed before the next; a call that is no JSON is left out, as it is whole."""
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    blocks = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"pieces": []})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                _grow(blocks[-1], event["delta"])
            case kind:
                assert (kind, event["index"], is_open) == ("content_block_stop", len(blocks) - 1, True)
                is_open = False
    assert not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message |= events[-2]["delta"] | {"usage": events[-2]["usage"]}
    return message | {"content": [made for block in blocks if (made := _closed(block)) is not None]}


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta:
        case {"type": "text_delta", "text": text}:
            assert block["type"] == "text"
            block["text"] += text
        case {"type": "thinking_delta", "thinking": text}:
            assert not block["signature"], "a thought is signed at its end"
            block["thinking"] += text
        case {"type": "signature_delta", "signature": text}:
            block["signature"] += text
        case {"type": "input_json_delta", "partial_json": text}:
            assert block["type"] == "tool_use"
            block["pieces"].append(text)
        case _:
            raise AssertionError(f"an unknown delta: {delta}")


def _closed(block: dict[str, Any]) -> dict[str, Any] | None:
    pieces = block.pop("pieces")
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads("".join(pieces))
        except json.JSONDecodeError:
            return None
    return block


def sum_response(events: list[dict[str, Any]]) -> list[str]:
    """The text of each item of OpenAI's responses, by its deltas alone.

    Numbers have no gap; an item, with one id, begins behind the end of the one before; what it says once more when it is done is
    what its deltas said.
    """
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    texts = []
    ids = []
    stage = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert (stage, event["output_index"]) == ("", len(texts))
            assert event["item"]["id"] not in ids
            ids.append(event["item"]["id"])
            texts.append("")
            stage = "open"
            continue
        assert event["output_index"] == len(texts) - 1
        assert ids[-1] == (event["item"]["id"] if kind == "output_item.done" else event["item_id"])
        match kind.rpartition(".")[2]:
            case "delta":
                assert stage == "open"
                texts[-1] += event["delta"]
            case "added":
                assert (kind, stage, texts[-1]) == ("content_part.added", "open", "")
            case "done":
                assert _said(event) == texts[-1]
                stage = "" if kind == "output_item.done" else "done"
    assert not stage or events[-1]["type"] == "response.failed"
    return texts


def text_of(item: dict[str, Any]) -> str:
    """Of an item of a response: its text, or a call's arguments."""
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def _said(done: dict[str, Any]) -> str:
    """By the event of an end."""
    if "item" in done:
        return text_of(done["item"])
    return done["part"]["text"] if "part" in done else done["text"] if "text" in done else done["arguments"]
