"""What a rank knew when a page violation was found, in one file that `quartet replay` runs again.

An .npz of arrays: the plan's bytes, tables and lengths as the device had them and as the plans want them, both before that plan;
tokens; who is to blame, as a JSON header. K and V are not in it: the violation is found before any kernel reads them.
"""

import json
import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError

_FORMAT = 3


@dataclass(frozen=True)
class PageDump:
    """rank 0 <= rank < config.tp; step: the plan's; pages: of each group's pool, null page included; message: what was found.

    plan        bytes of the plan;  masks: of its masked rows, empty where it has none
    tables      int32, found [slots * widths] of all groups, flat;  expected: the same as it should be; both before the plan
    lengths     int32 [slots], found, before the plan;  expected_lengths: as the plans say
    lost_pages  slots that may not run on, since their pages went to others: since which plan, and why
    tokens      int32 [slots, longest + 1]
    """

    config: EngineConfig
    rank: int
    step: int
    pages: tuple[int, ...]
    message: str
    plan: bytes
    masks: bytes
    lost_pages: dict[int, tuple[int, str]]
    tables: np.ndarray
    expected: np.ndarray
    lengths: np.ndarray
    expected_lengths: np.ndarray
    tokens: np.ndarray


_ARRAYS = ("tables", "expected", "lengths", "expected_lengths", "tokens")


def write_dump(dump: PageDump, folder: Path | None = None) -> Path:
    """Writes a new file, readable by its owner alone, in `folder`, by default the system's for temporary files; its path."""
    header = {**_header(dump), "format": _FORMAT}
    descriptor, name = tempfile.mkstemp(f"-step{dump.step}-rank{dump.rank}.npz", "quartet-pages-", folder)
    with os.fdopen(descriptor, "wb") as file:
        arrays = {each: getattr(dump, each) for each in _ARRAYS}
        encoded = {"header": json.dumps(header).encode(), "plan": dump.plan, "masks": dump.masks}
        arrays |= {name: np.frombuffer(data, np.uint8) for name, data in encoded.items()}
        np.savez_compressed(file, **arrays)
    return Path(name)


def _header(dump: PageDump) -> dict[str, Any]:
    plain = {name: getattr(dump, name) for name in ("rank", "step", "pages", "message")}
    return {**plain, "lost_pages": list(dump.lost_pages.items()), "config": msgspec.to_builtins(dump.config)}


def read_dump(path: Path) -> PageDump:
    """What `write_dump` wrote; ConfigError where it is not such a file."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header.pop("format") != _FORMAT:
                raise ConfigError(f"{path}: a page dump of another version")
            config = msgspec.convert(header.pop("config"), EngineConfig)
            header["pages"] = tuple(header["pages"])
            header["lost_pages"] = {slot: (step, why) for slot, (step, why) in header["lost_pages"]}
            encoded = {name: file[name].tobytes() for name in ("plan", "masks")}
            return PageDump(config=config, **encoded, **header, **{name: file[name] for name in _ARRAYS})
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: no page dump: {error}") from error
