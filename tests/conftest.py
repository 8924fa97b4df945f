"""What every tier shares: its order and limits, the devices it may ask for, and the nano checkpoints."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

from tests.support.repo_rules import TIERS, may_match

ORDER = ("pure", "cpu", "serve", "artefacts", "nodes", "gpu", "gpu4")  # cheap tiers first: a broken leaf shows in seconds
# Files of more than ten seconds come first in their tier: the last ones, for which other workers wait, are short. None is of a
# stem that the serve tier has in its usual run: its order is its own.
LONGEST = {
    *("test_haproxy_routing", "test_haproxy", "test_lost_node", "test_bombs", "test_draft_policy"),
    *("test_drafts", "test_adapted_groups", "test_compile_ahead", "test_exactness", "test_media_exactness"),
    *("test_formats", "test_quality", "test_selfcheck", "test_model", "test_nodes", "test_fp8_pages", "test_mixed_steps"),
    *("test_compile", "test_plan_command", "test_sequence_parallel", "test_step_times", "test_random_models", "test_drafters"),
}
GPUS_NEEDED = {"gpu": 1, "gpu4": 2}

# Tests reach no network, and their children inherit that: each `httpx.get` would read all certificates, for 40 ms of CPU.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
OFFLINE |= {"SSL_CERT_FILE": "", "SSL_CERT_DIR": os.devnull}

Nano = Callable[[str], Path]


def pytest_configure() -> None:
    os.environ.update(OFFLINE)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would our children
    patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("ci", max_examples=50, derandomize=False, print_blob=True, **patient)
    hypothesis.settings.load_profile("ci")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which `-m` selects no test is not imported, unless the command line names it."""
    marks = config.getoption("markexpr")
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if not marks or not collection_path.match("test_*.py") or collection_path in named:
        return None
    return None if may_match(collection_path.read_text(), marks) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by tier, refuse a test without one, and skip what this machine has too few GPUs for."""
    items.sort(key=lambda item: (ORDER.index(_tier(item)), item.path.stem not in LONGEST))
    for item in items:
        needed = GPUS_NEEDED.get(_tier(item), 0)
        if needed and needed > _gpu_count():
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {_gpu_count()}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread for torch in the cpu tier: the machine may have two cores, and small shapes gain nothing from both."""
    if _tier(item) == "cpu":
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Nano:
    """Builds a nano checkpoint of a family member on first use in the session: `nano("31b") -> Path` of its folder."""
    from tests.nano.random_models import ensure

    folder = tmp_path_factory.mktemp("nano")
    return cache(lambda member: ensure(member, folder))


@pytest.fixture(scope="module")
def forked_groups() -> Iterator[None]:
    """The processes of groups are forked from one that has imported torch."""
    from cluster import children
    from tests.support.forked import forked_by

    gc.collect()  # what files before this one have left open is closed before descriptors are counted
    with forked_by(children):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_socket_file_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever was killed with a socket of the file system open, its test removes it."""
    yield
    left = [str(path) for path in tmp_path_factory.getbasetemp().rglob("*") if path.is_socket()]
    assert not left, left


def _tier(item: pytest.Item) -> str:
    tiers = {mark.name for mark in item.iter_markers()} & TIERS
    if len(tiers) != 1:
        raise pytest.UsageError(f"{item.nodeid}: needs exactly one tier of {', '.join(ORDER)}, has {sorted(tiers)}")
    return tiers.pop()


@cache
def _gpu_count() -> int:
    """GPUs that this process may use, by NVML and CUDA_VISIBLE_DEVICES: the pure tier must not pay for torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return min(_nvml_count(), len([name for name in visible.split(",") if name.strip() not in {"", "-1"}]))
    return _nvml_count()


def _nvml_count() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0  # no driver, or one that does not answer
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
