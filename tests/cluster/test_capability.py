"""What GPUs mean for the attention backend, from invented GPUs."""

import sys

import pytest

from cluster.capability import Gpu, check_group, choose, node_gpus, probe, visible_gpus
from engine.errors import ConfigError

pytestmark = pytest.mark.pure


def gpus(count: int = 4, name: str = "B200", capability: tuple[int, int] = (10, 0)) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, name, f"GPU-{index}abc", capability, 180 << 30) for index in range(count))


@pytest.mark.parametrize(
    ("capability", "flashinfer", "choice"),
    [
        ((10, 0), "0.7.2", "trtllm_mha"),
        ((10, 3), "0.7.2", "trtllm_mha"),
        ((10, 0), None, "triton"),
        ((9, 0), "0.7.2", "triton"),
        ((12, 0), "0.7.2", "triton"),
        ((8, 0), None, "triton"),
    ],
)
def test_the_device_chooses_the_backend(capability: tuple[int, int], flashinfer: str | None, choice: str) -> None:
    """SM100 family with FlashInfer asks for trtllm_mha, any other GPU for triton; triton is what runs today, and it says so."""
    found = choose(gpus(capability=capability), flashinfer)
    assert (found.backend_choice, found.runs) == (choice, "triton")
    assert f"asks for {choice}" in str(found)
    assert "B200" in found.reason


def test_no_gpu_is_reference() -> None:
    """Without a GPU the choice is reference, FlashInfer or not."""
    found = choose((), "0.7.2")
    assert (found.backend_choice, found.runs) == ("reference", "reference")
    assert probe("").gpus == ()


def test_a_group_needs_its_gpus_on_one_node() -> None:
    """TP above the visible GPUs is refused in one line with both numbers; TP at their number is not."""
    with pytest.raises(ConfigError, match="tp 4 needs 4 GPUs on one node; this one shows 3") as refused:
        check_group(choose(gpus(3), None), 4)
    assert "\n" not in str(refused.value)
    assert len(check_group(choose(gpus(4), None), 4)) == 4
    assert len(check_group(choose(gpus(4), None), 2)) == 2


def test_the_gpus_of_a_group_must_agree() -> None:
    """A different fourth GPU is refused with both names for TP=4, and does not matter to TP=2."""
    mixed = choose((*gpus(3), Gpu(3, "H200", "GPU-3", (9, 0), 1)), None)
    with pytest.raises(ConfigError, match="GPU 0 is B200, GPU 3 is H200"):
        check_group(mixed, 4)
    assert len(check_group(mixed, 2)) == 2


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


def test_nvml_needs_no_torch() -> None:
    """Asking NVML, with a driver or without, imports no torch."""
    before = "torch" in sys.modules
    assert isinstance(node_gpus(), tuple)
    assert ("torch" in sys.modules) == before
