"""Settings of an engine group: each declared once with default, bounds and help; frozen, and sent
to every process.

EngineSettings   what a user may set; YAML, `quartet check-config` and docs/settings.md are made from it
EngineConfig     the same, with what the model and the node decide
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.adapters import MAX_ADAPTERS, MAX_RANK, AdapterFolders, read_adapter
from engine.architectures import Architecture, architecture_of
from engine.attention import BACKENDS
from engine.attention.backend_entry import RowKind
from engine.channel import MAX_RECORD
from engine.errors import ConfigError
from engine.geometry import PAGE_SIZE, DType, Geometry, KVGroup, Positive, kv_groups
from engine.media_geometry import MediaGeometries
from engine.protocol import FrozenStruct
from engine.quantisation import read_quantisation
from engine.weight_formats import FORMATS

Device = Literal["cpu", "cuda"]
LoadFormat = Literal["safetensors", "dummy"]
ToolGrammar = Literal["strict", "names", "off"]
Thinking = Literal["on", "off", "auto"]
WeightsName = Literal["auto", *FORMATS]  # type: ignore[valid-type]
AttentionName = Literal[*BACKENDS]  # type: ignore[valid-type]  # the registry's names, known at import
Duration = Annotated[float, Meta(gt=0)]

MAX_SEQS = 4096
LONGEST_STEP_MS = 300.0  # on a GPU: 8192 prompt tokens of a 26B take 0.12 s of one H200, 6000 of a 31B 0.3 s of two
LEAST_MEASURED = 16  # tokens of a sequence with which steps can be measured
AUTO_DRAFTS = (0, 1, 2, 3, 5, 7)  # graphs are captured for each; those between would gain some two percent
VERIFY_ROWS = 128  # queries x heads of a KV head that a GPU verifies at once


class Mtp(FrozenStruct, kw_only=True, forbid_unknown_fields=True):
    """Multi-token prediction: a drafter guesses tokens, and the model computes all of them in one
    step. The text is the same."""

    model: str | None = None
    """the drafter, as `model` (Google's: its name and -assistant)"""
    drafts: Literal["auto"] | Annotated[int, Meta(ge=0, le=8)] = "auto"
    """most draft tokens for each sequence and step: fewer, or none, while prompts fill the steps; auto: the fastest number, by
    measured step times and acceptance; 0: none"""


class KvEvents(FrozenStruct, kw_only=True, forbid_unknown_fields=True):
    """Tells routers over ZeroMQ, in vLLM's messages, which prefixes the KV cache holds. Subscribers
    read token ids of prompts."""

    endpoint: str | None = None
    """where a replica publishes: tcp://*:5557; replicas of one node each need a port; none: nowhere"""
    topic: str = ""
    """first frame of each message: kv@<pod address>:<API port>@<model> for llm-d"""


class EngineSettings(FrozenStruct, kw_only=True):
    """What a user may set, with its help. Times are in seconds."""

    tp: Annotated[int, Meta(ge=1, le=64)] = 1
    """ranks of a group: GPUs of one node"""
    dtype: DType = "bfloat16"
    """number format of activations, and of plain weights"""
    kv_dtype: Literal["auto", "fp8", DType] = "auto"
    """number format of the KV cache; auto: dtype, whatever config.json asks for; fp8: e4m3, half of bfloat16's memory, with three
    bits after the leading one, from compute capability 8.9 on"""
    weights: WeightsName = "auto"
    """format of matrices; auto: as config.json says, NVFP4 in fp8; fp8: plain folders too, converted at load, from compute
    capability 8.9 on; nvfp4: NVFP4 folders in four bits, activations too, on compute capability 10.0 and 10.3 with FlashInfer (not
    run on one yet)"""
    head: Literal["bf16", "fp8"] = "bf16"
    """format in which logits read the output table; bf16: as the table is loaded; fp8: a copy besides, from compute capability 8.9
    on, which steps of up to 64 rows read in half the time. The 64 best logits of each row, or more, are computed again from the
    table, so greedy choices are the same; all of them are where a row has a grammar, a bias or a penalty, and for logprobs of
    prompts"""
    max_seqs: Annotated[int, Meta(ge=1, le=MAX_SEQS)] = 16
    """sequences running at once"""
    max_len: Annotated[int, Meta(ge=2)] = 2048
    """tokens of one sequence, prompt and output"""
    prefill_budget: Annotated[int, Meta(ge=1)] = 2048
    """most rows of a step that computes prompt tokens, decode rows included, at most 6656 while some decode; a quarter is kept for
    prompts"""
    longest_step_ms: Duration | None = None
    """longest step in ms while some sequences decode, which is the longest gap between their tokens: prompts get as many tokens as
    the device computes in that time, by step times measured at boot and since, but a fifth of the time at least; none: 300 on a
    GPU, no limit on a CPU"""
    language_model_only: bool = False
    """leave out encoders of pictures and sound: their memory goes to the KV cache"""
    encoder_host_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """pinned host memory in bytes of each rank for encoder outputs that do not fit the 256 MiB cache on its device, so that a
    picture or clip that comes again is not encoded again. It may take up to twice as much; outputs of running prompts come in
    addition; 0: none"""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """share of the device that weights and KV pools may take"""
    pages: tuple[Positive, ...] | None = None
    """pages of each KV group, null page included; none: sized by need"""
    prefix_cache: bool = True
    """prefix caching: keep the KV pages of prompts and answers for requests with the same beginning"""
    kv_events: KvEvents = KvEvents()
    policy: Literal["fair", "arrival"] = "fair"
    """who is served when: fair, or arrival (strictly in order)"""
    tpot_target_ms: Duration | None = None
    """target mean time per output token in ms; steps take fewer prompt tokens, or fewer steps take any, by step times measured at
    boot and since, and encoders of media wait while steps are longer; prompts keep a fifth of the time even if that misses the
    target; none: a step takes what prefill_budget allows"""
    attention: AttentionName | None = None
    """backend; none: by GPU and FlashInfer, and `quartet doctor` says which and why"""
    attention_decode: AttentionName | None = None
    """backend of decode rows; none: as `attention`"""
    attention_extend: AttentionName | None = None
    """backend of prefill chunks; none: as `attention`"""
    flashinfer_download: bool = False
    """FlashInfer may fetch kernels that it lacks, at the first request that needs one"""
    mtp: Mtp = Mtp()
    adapters: AdapterFolders = msgspec.field(default_factory=dict)
    """LoRA adapters: the name that clients call one by as their `model`, and its folder as PEFT saves it, on every node with
    replicas (an absolute path), or its hub id"""
    max_adapters: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0
    """adapters on the device at once, each with room for max_rank at every matrix; others wait in host memory, and the least
    recently used one makes room; 0: those of `adapters`, with room for what they have, and none is loaded later"""
    max_rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 16
    """largest rank of an adapter where max_adapters is set"""
    max_host_adapters: Annotated[int, Meta(ge=0, le=1024)] = 0
    """adapters that are loaded at once, all of them in host memory; 0: max_adapters of them"""
    graphs: bool = True
    """on a GPU, capture steps as CUDA graphs at start and replay them; those with thousands of prompt tokens, and those that report
    logprobs of prompts, run without"""
    debug_pages: bool = False
    """compare the ranks' block tables with the plans in each step; a difference ends the group"""
    step_timeout_s: Duration = 60.0
    """a step that makes no progress for so long ends the group"""
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.5)] = 3.0
    """a process that is not scheduled for so long ends the group"""
    boot_timeout_s: Duration = 600.0
    """time from the start of a group's processes until it is ready"""

    def attention_of(self, kind: RowKind) -> AttentionName | None:
        return (self.attention_decode if kind == "decode" else self.attention_extend) or self.attention


class EngineConfig(EngineSettings, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One group. Made and checked by `engine_config`."""

    model: str  # local folder with config.json (and weights, unless load_format is dummy)
    device: Device
    load_format: LoadFormat = "safetensors"
    page: Literal[16, 32, 64] = PAGE_SIZE  # tokens of a KV page
    suppress: tuple[int, ...] = ()  # token ids that are never sampled
    debug_hash: bool = False  # add the final hidden rows to the state hash (tests; costs a copy a step)

    @cached_property
    def architecture(self) -> Architecture:
        return architecture_of(Path(self.model))

    @cached_property
    def geometry(self) -> Geometry:
        return self.architecture.read(Path(self.model))

    @cached_property
    def media(self) -> MediaGeometries:
        if self.language_model_only:
            return {}
        return self.architecture.encoders(Path(self.model))

    @property
    def drafts(self) -> tuple[int, ...]:
        if self.mtp.model is None:
            return (0,)
        if self.mtp.drafts == "auto":
            return AUTO_DRAFTS
        return tuple(sorted({0, self.mtp.drafts}))

    @property
    def step_limit_ms(self) -> float | None:
        if self.longest_step_ms is None and self.device == "cuda":
            return LONGEST_STEP_MS
        return self.longest_step_ms

    @property
    def adapter_slots(self) -> int:
        return self.max_adapters or len(self.adapters)

    @property
    def most_adapters(self) -> int:
        return max(self.adapter_slots, self.max_host_adapters)

    @property
    def measures_steps(self) -> bool:
        """Ranks measure step times at boot."""
        return self.max_len >= LEAST_MEASURED and not (self.step_limit_ms is None and self.tpot_target_ms is None)

    @property
    def widths(self) -> tuple[int, ...]:
        """Padded widths of decode rows on a GPU, ascending."""
        return tuple(sorted({1, *(1 + drafts for drafts in self.drafts)}))

    @property
    def widest(self) -> int:
        return self.widths[-1]

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return kv_groups(self.geometry, self.tp, self.page, "float8_e4m3fn" if self.kv_dtype == "fp8" else self.dtype)


def engine_config(**settings: object) -> EngineConfig:
    """ConfigError names a key that is unknown, mistyped or impossible."""
    try:
        config = msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine settings: {error}") from error
    _check_model(config)
    read_quantisation(Path(config.model), config.weights)
    _check_adapters(config)
    return config


def _check_adapters(config: EngineConfig) -> None:
    if config.max_host_adapters and not config.max_adapters:
        raise ConfigError(f"max_host_adapters {config.max_host_adapters}: max_adapters says how many of them the device holds")
    if len(config.adapters) > config.most_adapters:
        raise ConfigError(f"adapters names {len(config.adapters)}; max_host_adapters allows {config.most_adapters}")
    for name, folder in config.adapters.items():
        read_adapter(name, Path(folder))


def _check_model(config: EngineConfig) -> None:
    geometry = config.geometry
    _check_limits(config)
    if config.max_len > geometry.max_position:
        raise ConfigError(f"max_len {config.max_len} exceeds the model's {geometry.max_position} positions")
    _check_formats(config)
    groups = config.kv_groups
    _check_drafts(config, max(geometry.heads // config.tp // group.kv_heads for group in groups))
    from engine.plan import largest_plan, largest_result  # numpy comes with it, which `quartet --help` does without

    plan = largest_plan(
        config.max_seqs, config.max_len, config.prefill_budget, config.page, len(groups), width=config.widest
    )
    for name, largest in (("plan", plan), ("result", largest_result(config.max_seqs, config.widest))):
        if largest > MAX_RECORD:
            raise ConfigError(
                f"a step's {name} may take {largest} bytes with max_seqs {config.max_seqs}, max_len {config.max_len} and "
                f"prefill_budget {config.prefill_budget}; the ring between core and ranks carries at most {MAX_RECORD} at once"
            )
    if config.pages is None:
        return
    if len(config.pages) != len(groups):
        raise ConfigError(f"pages has {len(config.pages)} entries for {len(groups)} KV groups")
    for group, pages in zip(groups, config.pages, strict=True):
        least = group.worst_pages(config.max_len if group.window else 1) + 1
        if pages < least:
            raise ConfigError(f"pages: the {group.name} group needs at least {least} pages (null page included), not {pages}")


def _check_formats(config: EngineConfig) -> None:
    if config.kv_dtype not in ("auto", "fp8", config.dtype):
        raise ConfigError(f"kv_dtype {config.kv_dtype} with dtype {config.dtype} is not implemented: say auto or fp8")
    if config.head == "fp8" and config.device == "cuda" and config.dtype != "bfloat16":
        raise ConfigError(f"head fp8 with dtype {config.dtype} is not implemented on a GPU: say bf16, or dtype bfloat16")
    if config.weights == "nvfp4" and config.device == "cuda" and config.dtype != "bfloat16":
        raise ConfigError(f"weights nvfp4 with dtype {config.dtype} is not implemented on a GPU: say dtype bfloat16")


def _check_limits(config: EngineConfig) -> None:
    for name in ("tpot_target_ms", "longest_step_ms"):
        if getattr(config, name) is not None and config.max_len < LEAST_MEASURED:
            raise ConfigError(f"{name} needs a max_len of at least {LEAST_MEASURED} to measure steps by, not {config.max_len}")


def _check_drafts(config: EngineConfig, heads: int) -> None:
    """`heads`: most query heads of a rank that share a KV head."""
    if config.mtp.model is None and config.mtp.drafts not in ("auto", 0):
        raise ConfigError(f"mtp.drafts {config.mtp.drafts}: mtp.model must name the assistant that makes them")
    if config.device == "cuda" and heads * config.widest > VERIFY_ROWS:
        raise ConfigError(
            f"mtp.drafts {config.widest - 1}: at most {VERIFY_ROWS // heads - 1} with tp {config.tp}, "
            f"where {heads} query heads share a KV head"
        )
