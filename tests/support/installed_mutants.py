"""Faults of reading what others have installed or saved: checkpoints and packages. Part of `tests.support.mutants`."""

from tests.support.fault import Fault

INSTALLED = (
    Fault(
        "heads-of-any-shape-are-compared", "engine/rank/load/loader.py",
        "head.shape == (geometry.vocab, geometry.hidden) and ", "", "engine/rank/test_odd_checkpoints.py",
    ),
    Fault(
        "bounds-of-any-shape-are-read", "engine/rank/models/clipped.py",
        "if math.prod(header.shape) != 1:", "if False:", "engine/rank/test_vision.py",
    ),
    Fault(
        "drafter-looks-at-more-clusters-than-there-are", "engine/rank/models/assistant_geometry.py",
        "not 0 < assistant.centroid_top_k <= assistant.centroids", "not 0 < assistant.centroid_top_k",
        "engine/rank/test_assistant.py",
    ),
    Fault(
        "drafters-numbers-are-not-checked", "engine/rank/models/assistant_geometry.py",
        "msgspec.convert(msgspec.to_builtins(assistant), AssistantGeometry)", "pass", "engine/rank/test_assistant.py",
    ),
    Fault(
        "old-flashinfer-ends-the-start", "engine/attention/flashinfer_files.py",
        ' if artifacts.exists() else ""', "", "engine/attention/test_flashinfer_files.py",
    ),
)
