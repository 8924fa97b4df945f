"""OpenAI's transcriptions: a chat with one clip and an instruction, without thoughts.

    {"text": ..., "usage": ...}        with stream    data: {"type": "transcript.text.delta", "delta": ...}
                                                      data: {"type": "transcript.text.done", "text": ..., "usage": ...}
"""

import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deploy.edge.answers.response_format import OneChoice, ServedModel, Usage
from deploy.edge.bodies import key_types as kt
from deploy.edge.bodies.form_reader import MEDIA_TYPE, FormReader
from deploy.edge.openai.data_events import DONE, DataEvents, data_event
from deploy.edge.openai.forms import text_of
from deploy.edge.requests.ask import Ask, ChatMessage, ChatPrompt, Media, Part, Text
from deploy.edge.requests.common_keys import CommonSamplingKeys
from deploy.edge.serving.api import GenerationApi
from engine.front.generation import Delta
from engine.protocol import JsonObject

_ABSENT = ("include", "timestamp_granularities", "known_speaker_names", "known_speaker_references")
_INSTRUCTION = """Transcribe the following speech segment in {language}.

Follow these specific instructions for formatting the output:
* Only output the transcription, with no newlines.
* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 instead of three."""


class TranscriptionRequest(CommonSamplingKeys, kw_only=True):
    """POST /v1/audio/transcriptions, as a form."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    model: kt.ModelName | None = None
    language: kt.Kind | None = None
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: Literal["json", "text"] = "json"
    stream: bool = False
    max_completion_tokens: kt.Count | None = None

    def ask(self) -> Ask:
        """Greedy by default, as OpenAI's is."""
        if self.language:
            language = f"the language {self.language}"
        else:
            language = "its original language"
        if self.prompt:
            context = f"\n\nContext: {self.prompt}"
        else:
            context = ""
        parts: list[Part] = [Text(_INSTRUCTION.format(language=language) + context), Media("audio", f"data:;base64,{self.file}")]
        return Ask(
            prompt=ChatPrompt([ChatMessage("user", parts)], thinks=False),
            model=self.model,
            sampling=self.sampling(temperature=self.temperature or 0.0, max_tokens=self.max_completion_tokens),
            stream=self.stream,
            prompt_key="file",
        )


class TranscriptionFormat(OneChoice, DataEvents):
    """A whole answer may be plain text."""

    def __init__(self, _: ServedModel, request: TranscriptionRequest) -> None:
        super().__init__()
        self.id = secrets.token_hex(16)
        self._plain = request.response_format == "text"
        if self._plain:
            self.media_type = "text/plain; charset=utf-8"

    def events(self, index: int, delta: Delta) -> bytes:
        self.add(index, delta)
        added = text_of(delta)
        if added:
            return data_event({"type": "transcript.text.delta", "delta": added})
        return b""

    def end(self, usage: Usage) -> bytes:
        return data_event({"type": "transcript.text.done", **self._said(usage)}) + DONE

    def full(self, usage: Usage) -> bytes:
        if self._plain:
            return self.choice.content.encode()
        return msgspec.json.encode(self._said(usage))

    def _said(self, usage: Usage) -> JsonObject:
        details = {"text_tokens": usage.prompt - usage.media["audio_tokens"], **usage.media}
        return {"text": self.choice.content, "usage": {
            "type": "tokens", "input_tokens": usage.prompt, "output_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion, "input_token_details": details,
        }}  # fmt: skip


TRANSCRIPTIONS = GenerationApi(
    path="/v1/audio/transcriptions",
    operation="transcription",
    reader=FormReader(TranscriptionRequest, _ABSENT),
    format=TranscriptionFormat,
    media_type=MEDIA_TYPE,
)
