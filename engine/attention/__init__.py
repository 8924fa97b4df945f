"""The attention backends by name. Where several could run, the last one is the default.

Each has an entry here, without torch, and parts in `engine/rank/attention/`.
"""

from engine.attention.backend_entry import BackendEntry
from engine.attention.trtllm_mha import TRTLLM_MHA

REFERENCE = BackendEntry("reference", "cpu", "engine.rank.attention.paged")
TRITON = BackendEntry("triton", "cuda", "engine.rank.attention.paged")
BACKENDS = {entry.name: entry for entry in (REFERENCE, TRITON, TRTLLM_MHA)}
OWN = {"cpu": REFERENCE, "cuda": TRITON}  # by device: Quartet's own ops, which stand in for any other
