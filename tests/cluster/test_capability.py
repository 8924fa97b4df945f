"""What a node has for a group, from invented GPUs."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NoReturn

import pynvml
import pytest

from cluster.capability import Capability, Gpu, check_group, node_gpus, probe, visible_gpus
from engine.errors import ConfigError

pytestmark = pytest.mark.pure


def gpus(count: int = 4, name: str = "B200", capability: tuple[int, int] = (10, 0)) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, name, f"GPU-{index}abc", capability, 180 << 30) for index in range(count))


def test_the_oldest_gpu_counts() -> None:
    """A node's architecture is the least of its GPUs'; without a GPU there is none."""
    assert Capability((*gpus(2), Gpu(2, "H200", "GPU-2", (9, 0), 1))).architecture == (9, 0)
    assert probe("").gpus == ()
    assert Capability().architecture is None


def test_a_group_needs_its_gpus_on_one_node() -> None:
    """TP above the visible GPUs is refused in one line with both numbers; TP up to their number is not."""
    with pytest.raises(ConfigError, match="tp 4 needs 4 GPUs on one node; this one shows 3") as refused:
        check_group(Capability(gpus(3)), 4)
    assert "\n" not in str(refused.value)
    check_group(Capability(gpus(4)), 4)
    check_group(Capability(gpus(4)), 2)


def test_the_gpus_of_a_group_must_agree() -> None:
    """A different fourth GPU is refused with both names for TP=4, and does not matter to TP=2."""
    mixed = Capability((*gpus(3), Gpu(3, "H200", "GPU-3", (9, 0), 1)))
    with pytest.raises(ConfigError, match="GPU 0 is B200, GPU 3 is H200; choose with CUDA_VISIBLE_DEVICES"):
        check_group(mixed, 4)
    check_group(mixed, 2)


@pytest.mark.parametrize(
    ("named", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,9,1", [0]),
        ("GPU-2,GPU-1abc", [2, 1]),
        ("GPU-", []),
        ("1,1", [1]),
    ],
)
def test_visible_devices_follow_cuda(named: str | None, indices: list[int]) -> None:
    """CUDA_VISIBLE_DEVICES names devices by index or UUID prefix, in its order, and an entry that is none hides what follows."""
    assert [gpu.index for gpu in visible_gpus(gpus(), named)] == indices


@pytest.mark.parametrize("fails", ["", "nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_fails_is_named(fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A library of another version, or a GPU that was lost: no GPU is there, and the log says why. Nothing does where there is no
    driver."""

    def raising(code: int) -> Callable[..., NoReturn]:
        def call(*_: object) -> NoReturn:
            raise pynvml.NVMLError(code)

        return call

    answers = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": "B200", "nvmlDeviceGetUUID": "GPU-0abc", "nvmlDeviceGetCudaComputeCapability": (10, 0),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=180 << 30),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    if not fails:
        assert node_gpus() == gpus(1)
        return
    monkeypatch.setattr(pynvml, fails, raising(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert node_gpus() == ()
    assert caplog.messages == ["no GPU is used, as the driver does not answer: RM has detected an NVML/RM version mismatch."]
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert node_gpus() == ()
    assert len(caplog.messages) == 1


def test_nvml_needs_no_torch() -> None:
    """Asking NVML, with a driver or without, imports no torch."""
    before = "torch" in sys.modules
    assert isinstance(node_gpus(), tuple)
    assert ("torch" in sys.modules) == before
