"""Runs again, in one process, what was recorded: a plan stream to its tokens, a page dump to its violation."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.config import Device, DType, EngineConfig, engine_config
from engine.errors import PageViolation
from engine.plan import StepResult, decode_result, encode_plan
from engine.rank.builder import build, load_rank
from engine.rank.page_dump import PageDump
from engine.rank.parallel import Single
from engine.rank.plan_stream import PlanStream
from engine.rank.profiling import bare_rank
from engine.rank.profiling.loopback import Loopback
from engine.rank.runner import Runner


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
    """Every plan, in order, on one rank."""
    runner = build(load_rank(config, Single(), torch.device(config.device)), stream.pages)
    if runner.capturable:
        runner.capture()
    results = [_run(runner, encode_plan(plan), stream.masks.get(plan.step, b"")) for plan in stream.plans]
    return Replayed(results, runner.state_hash)


def _run(runner: Runner, data: bytes, masks: bytes) -> StepResult:
    launched = runner.launch(data, masks)
    result = decode_result(launched.result())
    launched.fold()
    return result


@torch.inference_mode()
def replay_dump(dump: PageDump, folder: Path, device: Device) -> str | None:
    """The dump's plan, over its tables, on one rank of its group: the violation that is found, None where there is none.

    folder: of the model, of which the shape counts: weights, K and V are random. On a CPU attention is the reference's: what
    FlashInfer's parts copied wrongly shows on a GPU only.
    """
    config = msgspec.structs.replace(
        dump.config, model=str(folder), device=device, load_format="dummy", graphs=False, debug_pages="every"
    )
    if device == "cpu":
        names = dict.fromkeys(("attention", "attention_decode", "attention_extend"))
        config = msgspec.structs.replace(config, dtype="float32", **names)
    place = torch.device(device)
    parallel = Single() if config.tp == 1 else Loopback(config.tp, place)
    rank = bare_rank.build(load_rank(config, parallel, place, checked=False), dump.pages)
    pages = rank.runner.pages
    assert pages is not None, config
    pages.dumps = False
    pages.restore(dump)
    try:
        _run(rank.runner, dump.plan, dump.masks)
    except PageViolation as error:
        return str(error)
    return None
