"""The attention backends there are, by name. Where several could run, the last one is the default.

Each has an entry here, without torch, and its parts in `engine/rank/attention/`, imported by the ranks that run it.
"""

from engine.attention.backend_entry import BackendEntry
from engine.attention.trtllm_mha import TRTLLM_MHA

REFERENCE = BackendEntry("reference", "cpu", "engine.rank.attention.paged")
TRITON = BackendEntry("triton", "cuda", "engine.rank.attention.paged")
BACKENDS = {entry.name: entry for entry in (REFERENCE, TRITON, TRTLLM_MHA)}
OWN = {"cpu": REFERENCE, "cuda": TRITON}  # by device: Quartet's own ops, which stand in for any other


def wrong_device(entry: BackendEntry, device: str) -> str | None:
    """Why the backend cannot run on a torch device of that type; None: it can."""
    if device == "cuda" and entry.device == "cpu":
        return f"{entry.name} runs on the CPU; on a GPU {TRITON.name} is the backend"
    if device == "cpu" and entry.device == "cuda":
        return f"{entry.name} needs a GPU; this engine runs on the CPU, where {REFERENCE.name} is the backend"
    return None
