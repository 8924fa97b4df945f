"""What the core prepares before it serves: the scheduler's settings, the vocabulary for grammars, garbage collection."""

import gc
import logging
from pathlib import Path

from engine.config import EngineConfig
from engine.core.scheduler import SchedulerConfig
from engine.errors import CheckpointError
from engine.geometry import read_geometry
from engine.lifeline import StepTimes
from engine.matcher import Vocabulary

logger = logging.getLogger(__name__)


def scheduler_config(config: EngineConfig, pages: tuple[int, ...], times: StepTimes | None = None) -> SchedulerConfig:
    """The scheduler's settings, once the pools are sized and the ranks are ready."""
    groups = config.kv_groups(read_geometry(Path(config.model)))
    share = config.prefix_cache_share if config.prefix_cache else None
    return SchedulerConfig(
        groups,
        pages,
        config.max_seqs,
        config.max_len,
        config.prefill_budget,
        config.widest,
        cache_share=share,
        policy=config.policy,
        step_times=times,
        tpot_target_ms=config.tpot_target_ms,
    )


def collect_rarely() -> None:
    """Exclude existing objects from garbage collection, and collect the rest rarely: a step makes no cycles, and a pass over every
    sequence and cached prefix would hold up all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def read_vocabulary(config: EngineConfig) -> Vocabulary | None:
    """The vocabulary for grammars; None if the checkpoint has no tokenizer."""
    folder = Path(config.model)
    try:
        return Vocabulary.of_checkpoint(folder, read_geometry(folder).vocab)
    except CheckpointError as error:
        logger.warning("requests with a grammar will be refused: %s", error)
        return None
