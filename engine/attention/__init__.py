"""The attention backends by name; the last one that can run is the default. Their parts are in `engine/rank/attention/`."""

from engine.attention.backend_entry import BackendEntry
from engine.attention.trtllm_mha import TRTLLM_MHA

REFERENCE = BackendEntry("reference", "cpu", "engine.rank.attention.paged")
TRITON = BackendEntry("triton", "cuda", "engine.rank.attention.paged")
BACKENDS = {entry.name: entry for entry in (REFERENCE, TRITON, TRTLLM_MHA)}
OWN = {"cpu": REFERENCE, "cuda": TRITON}  # by device: Quartet's own ops, which stand in for any other
