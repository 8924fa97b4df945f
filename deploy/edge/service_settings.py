"""What does not change while a model is served."""

from collections.abc import Mapping
from pathlib import Path

from deploy.edge.edge_settings import LimitSettings, LogSettings, MediaSettings
from engine.audio_geometry import AudioGeometry
from engine.checkpoint import generation_config
from engine.config import Thinking, ToolGrammar
from engine.front.text import TextProcessor
from engine.media_geometry import MediaGeometries
from engine.protocol import FrozenStruct, MediaKind


class Defaults(FrozenStruct):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def read(cls, folder: Path) -> "Defaults":
        """do_sample: false means greedy."""
        config = generation_config(folder)
        if config.get("do_sample") is False:
            return cls(temperature=0.0)
        return cls(**{name: config[name] for name in ("temperature", "top_k", "top_p") if config.get(name) is not None})


def media_kinds(encoders: MediaGeometries, text: TextProcessor) -> frozenset[MediaKind]:
    return frozenset(kind for kind in encoders if text.control_id(f"<|{kind}|>") is not None)


def audio_row_samples(encoders: MediaGeometries) -> int:
    """0 for log-mel frames."""
    audio = encoders.get("audio")
    if isinstance(audio, AudioGeometry) and audio.unified:
        return audio.features
    return 0


class ServiceSettings(FrozenStruct):
    """`names`: the model's, answers have the first; `others`: (name, context) of the cluster's
    other models. `row_samples`: of audio, 0: log-mel frames. `capacity`: open choices.
    `adapters`: the config's folders; others load from below `adapter_folder`, at most
    `most_adapters` in all."""

    names: tuple[str, ...]
    others: tuple[tuple[str, int], ...]
    vocab: int
    max_len: int
    defaults: Defaults
    limits: LimitSettings
    media: MediaSettings
    media_kinds: frozenset[MediaKind]
    row_samples: int
    logs: LogSettings
    max_tokens: int | None
    capacity: int
    queue_tokens: int
    fingerprint: str
    weight_format: str
    tool_grammar: ToolGrammar
    thinking: Thinking
    adapters: Mapping[str, str] = {}
    adapter_folder: str | None = None
    most_adapters: int = 0

    @property
    def name(self) -> str:
        return self.names[0]
