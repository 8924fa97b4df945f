"""Settings of one engine group: frozen, validated once, handed to every process over the boot handshake."""

from pathlib import Path
from typing import Literal

import msgspec

from engine.channel import MAX_RECORD
from engine.errors import ConfigError
from engine.geometry import PAGE_SIZE, Geometry, check_tp, kv_groups, read_geometry
from engine.plan import largest_plan

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
LoadFormat = Literal["safetensors", "dummy"]
LogLevel = Literal["debug", "info", "warning"]
PolicyName = Literal["fair", "arrival"]
AttentionName = Literal["reference", "triton"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One group. Built by `engine_config`, which checks it; never mutated.

    model            local folder with config.json (and the weights, unless load_format is dummy)
    tp               ranks
    max_seqs         slots: sequences running at once
    max_len          tokens of one sequence, prompt and output
    prefill_budget   rows of a step that computes prompt tokens, of all sequences, decode rows among them (vLLM's
                     max_num_batched_tokens); a quarter of it is always the prompts'
    core_log         what the core writes to stderr: info, a line a second of work and class of step; debug, a line a step
    policy           who is served when: "fair", or "arrival" (strictly in order)
    tpot_target_ms   steps are kept so short, by what the ranks measure at boot, that running streams get a token every so many
                     milliseconds: a prompt takes longer then; None: each step takes what the budget allows
    prefix_cache     keep the pages of prompts and answers, and compute nothing twice that is still there
    prefix_cache_share  how much of each pool may lie idle for it; running sequences take it back whenever they need it
    pages            pages of each KV group, null page included; None: sized by need from `memory_fraction` of the device
    attention        backend asked for; None: what the device runs: triton on a GPU, reference on a CPU
    graphs           on a GPU, decode steps are captured and replayed
    debug_hash       mix the bits of the final hidden rows into the state hash (tests; costs a copy a step)
    step_timeout_s   a step that makes no progress for so long ends the group
    heartbeat_timeout_s  a process that is not scheduled for so long ends the group
    boot_timeout_s   spawn to ready
    """

    model: str
    tp: int
    device: Device
    dtype: DType
    load_format: LoadFormat = "safetensors"
    max_seqs: int = 16
    max_len: int = 2048
    prefill_budget: int = 512
    core_log: LogLevel = "info"
    policy: PolicyName = "fair"
    tpot_target_ms: float | None = None
    prefix_cache: bool = True
    prefix_cache_share: float = 1.0
    page: int = PAGE_SIZE
    pages: tuple[int, ...] | None = None
    attention: AttentionName | None = None
    graphs: bool = True
    memory_fraction: float = 0.9
    suppress: tuple[int, ...] = ()
    debug_hash: bool = False
    step_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 3.0
    boot_timeout_s: float = 600.0


def engine_config(**settings: object) -> EngineConfig:
    """A checked EngineConfig from keyword settings; ConfigError names the key that is unknown, mistyped or impossible."""
    unknown = set(settings) - set(EngineConfig.__struct_fields__)
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise ConfigError(f"unknown engine setting {min(unknown)!r}; known: {known}")
    try:
        config = msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine settings: {error}") from error
    _check_numbers(config)
    _check_model(config, read_geometry(Path(config.model)))
    return config


def _check_numbers(config: EngineConfig) -> None:
    for name in ("tp", "max_seqs", "max_len", "prefill_budget"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}")
    for name in ("step_timeout_s", "heartbeat_timeout_s", "boot_timeout_s"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be positive, not {getattr(config, name)}")
    if config.tpot_target_ms is not None and not config.tpot_target_ms > 0:
        raise ConfigError(f"tpot_target_ms must be positive, not {config.tpot_target_ms}")
    if config.tpot_target_ms is not None and config.max_len < 8:
        raise ConfigError(f"tpot_target_ms needs a max_len of at least 8 to measure steps by, not {config.max_len}")
    if config.page not in (16, 32, 64):
        raise ConfigError(f"page must be 16, 32 or 64, not {config.page}")
    for name in ("memory_fraction", "prefix_cache_share"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} must lie in (0, 1], not {getattr(config, name)}")


def _check_model(config: EngineConfig, geometry: Geometry) -> None:
    if config.max_len > geometry.max_position:
        raise ConfigError(f"max_len {config.max_len} exceeds the model's {geometry.max_position} positions")
    check_tp(geometry, config.tp)
    groups = kv_groups(geometry, config.tp, config.page)
    largest = largest_plan(config.max_seqs, config.max_len, config.prefill_budget, config.page, len(groups))
    if largest > MAX_RECORD:
        raise ConfigError(
            f"a step's plan may take {largest} bytes with max_seqs {config.max_seqs}, max_len {config.max_len} and prefill_budget "
            f"{config.prefill_budget}; the ring to the ranks carries at most {MAX_RECORD} at once"
        )
    if config.pages is None:
        return
    if len(config.pages) != len(groups):
        raise ConfigError(f"pages has {len(config.pages)} entries for {len(groups)} KV groups")
    for group, pages in zip(groups, config.pages, strict=True):
        least = group.worst_pages(config.max_len if group.window else 1) + 1
        if pages < least:
            raise ConfigError(f"pages: the {group.name} group needs at least {least} pages (null page included), not {pages}")
