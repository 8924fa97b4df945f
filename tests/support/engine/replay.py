"""Runs a recorded plan stream again, in one process, to its tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import Device, EngineConfig, engine_config
from engine.geometry import DType
from engine.plan import StepResult
from engine.rank.builder import build, load_rank
from engine.rank.parallel import Single
from tests.support.engine.plan_stream import PlanStream
from tests.support.engine.ranks import run


@dataclass(frozen=True)
class Replayed:
    """What a stream gave this time, and the state hash at its end."""

    results: list[StepResult]
    state_hash: int


def stream_config(stream: PlanStream, folder: Path, device: Device, dtype: DType, graphs: bool) -> EngineConfig:
    """The engine that the stream was recorded from, on a device; ConfigError where it is impossible."""
    settings = {**stream.settings, "model": str(folder), "tp": 1, "pages": stream.pages, "debug_hash": True, "graphs": graphs}
    return engine_config(**settings, device=device, dtype=dtype)


def replay_stream(stream: PlanStream, config: EngineConfig) -> Replayed:
    runner = build(load_rank(config, Single(), torch.device(config.device)), stream.pages)
    if runner.capturable:
        runner.capture()
    results = [run(runner, plan, stream.masks.get(plan.step, b"")) for plan in stream.plans]
    return Replayed(results, runner.state_hash)
