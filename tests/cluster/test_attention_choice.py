"""The table of attention backends: GPU, FlashInfer, settings -> backends of decode rows and chunks, and the sentence."""

from typing import Any

import pytest

from cluster.attention_choice import AttentionChoice, choose_attention
from engine.attention.flashinfer_files import FlashInferFiles
from engine.attention.trtllm_mha import CUBIN_DOWNLOAD_COMMAND
from engine.config import EngineConfig, Mtp
from engine.errors import ConfigError

pytestmark = pytest.mark.pure

WHOLE = FlashInferFiles("0.7.2.post1", "/kernels", "nvcc")
NONE = FlashInferFiles()
B200, B300, H200, RTX, ADA, A100, T4 = (10, 0), (10, 3), (9, 0), (12, 0), (8, 9), (8, 0), (7, 5)
NO_KERNELS = "FlashInfer 0.7.2.post1 lacks its kernels on disk, and no request may wait for a download"
NO_LAUNCHER = "FlashInfer 0.7.2.post1 can build no launcher: nvcc and ninja are not both there"
WHERE = "kernels in /kernels"
NO_FAMILY = "is not of the SM100 family"


def choose(architecture: tuple[int, int] | None, found: FlashInferFiles, **settings: Any) -> AttentionChoice:
    config = {"model": "", "tp": 4, "device": "cuda", "dtype": "bfloat16"} | settings
    return choose_attention(EngineConfig(**config), architecture, found)


DEFAULTS = [
    (B200, WHOLE, "trtllm_mha", "SM100 with FlashInfer 0.7.2.post1, " + WHERE),
    (B300, WHOLE, "trtllm_mha", "SM103 with FlashInfer 0.7.2.post1, " + WHERE),
    (B200, WHOLE._replace(version="0.7.0.post1", launcher="prebuilt"), "trtllm_mha", "SM100 with FlashInfer 0.7.0.post1, " + WHERE),
    (B200, NONE, "triton", "SM100 without FlashInfer"),
    (B200, WHOLE._replace(version="0.6.18"), "triton", "FlashInfer 0.6.18 is not among those tried, 0.7.0 to below 0.8"),
    (B200, WHOLE._replace(version="0.8.0"), "triton", "FlashInfer 0.8.0 is not among those tried, 0.7.0 to below 0.8"),
    (B200, WHOLE._replace(cubins=None), "triton", NO_KERNELS),
    (B200, WHOLE._replace(launcher=None), "triton", NO_LAUNCHER),
    (H200, WHOLE, "triton", f"SM90 {NO_FAMILY}: triton by default"),
    (RTX, WHOLE, "triton", f"SM120 {NO_FAMILY}: triton by default"),
    (A100, WHOLE, "triton", f"SM80 {NO_FAMILY}, and FlashInfer has no such kernels for it"),
    (None, WHOLE, "reference", "no GPU"),
]


@pytest.mark.parametrize(("architecture", "found", "backend", "reason"), DEFAULTS)
def test_by_default(architecture: tuple[int, int] | None, found: FlashInferFiles, backend: str, reason: str) -> None:
    """Without settings: trtllm_mha for both kinds of rows where all of it is there, else triton, else reference; one sentence."""
    choice = choose(architecture, found)
    assert (choice.decode, choice.extend, choice.name, choice.reason) == (backend, backend, backend, reason)
    assert str(choice) == f"attention {backend}: {reason}"


def test_what_would_change_it() -> None:
    """On an SM100 GPU that lacks something the advice names it; where nothing would help there is none."""
    assert choose(B200, NONE).advice == "make install-gpu"
    assert CUBIN_DOWNLOAD_COMMAND in choose(B200, WHOLE._replace(cubins=None)).advice
    assert "CUDA toolkit" in choose(B200, WHOLE._replace(launcher=None)).advice
    assert [choose(gpu, WHOLE).advice for gpu in (B200, H200, A100, None)] == [""] * 4


ASKED = [
    (B200, WHOLE, {"attention": "triton"}, "triton", "triton"),
    (B200, WHOLE, {"attention": "triton", "attention_decode": "trtllm_mha"}, "trtllm_mha", "triton"),
    (B200, WHOLE._replace(cubins=None), {"flashinfer_download": True}, "trtllm_mha", "trtllm_mha"),
    (B200, WHOLE, {"dtype": "float32"}, "triton", "triton"),
    (B200, WHOLE, {"mtp": Mtp(model="drafter")}, "triton", "trtllm_mha"),
    (B200, WHOLE, {"mtp": Mtp(model="drafter", drafts=0)}, "trtllm_mha", "trtllm_mha"),
    (B200, WHOLE, {"kv_dtype": "fp8"}, "triton", "triton"),
    (B200, WHOLE, {"kv_dtype": "bfloat16"}, "trtllm_mha", "trtllm_mha"),
    (ADA, NONE, {"kv_dtype": "fp8"}, "triton", "triton"),
    (B300, WHOLE, {"weights": "nvfp4"}, "trtllm_mha", "trtllm_mha"),
    (B200, WHOLE._replace(cubins=None), {"weights": "nvfp4"}, "triton", "triton"),
    (None, NONE, {"weights": "nvfp4", "device": "cpu"}, "reference", "reference"),
    (H200, WHOLE._replace(cubins=None), {"attention_decode": "trtllm_mha"}, "trtllm_mha", "triton"),
    (RTX, WHOLE, {"attention_decode": "trtllm_mha", "attention_extend": "triton"}, "trtllm_mha", "triton"),
    (None, NONE, {"attention": "reference", "device": "cpu"}, "reference", "reference"),
]


@pytest.mark.parametrize(("architecture", "found", "settings", "decode", "extend"), ASKED)
def test_settings_win(
    architecture: tuple[int, int] | None, found: FlashInferFiles, settings: dict[str, Any], decode: str, extend: str
) -> None:
    """A setting decides for its kind of rows, and both kinds may differ: the name then says both."""
    choice = choose(architecture, found, **settings)
    assert (choice.decode, choice.extend) == (decode, extend)
    assert choice.name == (decode if decode == extend else f"{decode} decode, {extend} extend")


REFUSED = [
    (H200, WHOLE, {"attention": "trtllm_mha"}, "attention_extend: trtllm_mha: SM90 is not of the SM100 family, which alone"),
    (H200, NONE, {"attention_decode": "trtllm_mha"}, "attention_decode: trtllm_mha: SM90 without FlashInfer (make install-gpu)"),
    (A100, WHOLE, {"attention_decode": "trtllm_mha"}, "SM80 is not of the SM100 family, and FlashInfer has no such kernels for it"),
    (B200, WHOLE._replace(version="0.6.13"), {"attention": "trtllm_mha"}, "FlashInfer 0.6.13 is not among those tried"),
    (B200, WHOLE._replace(cubins=None), {"attention": "trtllm_mha"}, CUBIN_DOWNLOAD_COMMAND),
    (B200, WHOLE._replace(launcher=None), {"attention_extend": "trtllm_mha"}, "can build no launcher"),
    (B200, WHOLE, {"attention": "trtllm_mha", "dtype": "float32"}, "compute in bfloat16, not float32"),
    (B200, WHOLE, {"attention": "trtllm_mha", "mtp": Mtp(model="drafter")}, "trtllm_mha: its decode rows are of one token"),
    (B200, WHOLE, {"attention_decode": "trtllm_mha", "kv_dtype": "fp8"}, "trtllm_mha: over fp8 pages it would round queries"),
    (A100, NONE, {"kv_dtype": "fp8"}, "kv_dtype fp8 needs a GPU of compute capability 8.9 or later, and this is SM80"),
    (H200, WHOLE, {"weights": "nvfp4"}, "capability 10.0 or 10.3 with FlashInfer, and this is SM90: set weights: auto"),
    (RTX, WHOLE, {"weights": "nvfp4"}, "and this is SM120: set weights: auto"),
    (B200, NONE, {"weights": "nvfp4"}, "weights nvfp4: SM100 without FlashInfer (make install-gpu)"),
    (B200, WHOLE._replace(launcher=None), {"weights": "nvfp4"}, "weights nvfp4: FlashInfer 0.7.2.post1 can build no launcher"),
    (B200, WHOLE._replace(version="0.6.18"), {"weights": "nvfp4"}, "weights nvfp4: FlashInfer 0.6.18 is not among those tried"),
    (B200, WHOLE, {"attention": "reference"}, "reference runs on the CPU; on a GPU triton is the backend"),
    (None, WHOLE, {"attention": "triton"}, "triton needs a GPU; this engine runs on the CPU"),
    (None, WHOLE, {"attention_decode": "trtllm_mha"}, "it needs a GPU; this engine runs on the CPU"),
    (T4, NONE, {}, "SM75 is too old: Quartet's kernels compute in bf16, which needs SM80"),
]


@pytest.mark.parametrize(("architecture", "found", "settings", "said"), REFUSED)
def test_what_cannot_be_is_refused(
    architecture: tuple[int, int] | None, found: FlashInferFiles, settings: dict[str, Any], said: str
) -> None:
    """A setting that this node cannot follow, and a GPU too old for anything, are ConfigErrors of one line with the reason."""
    with pytest.raises(ConfigError) as refused:
        choose(architecture, found, **settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fallbacks_are_part_of_the_sentence() -> None:
    """What a rank's check at start turned off stands behind the reason, and the name says that there is some."""
    choice = choose(B200, WHOLE)._replace(fallbacks=("decode rows of sliding layers run triton",))
    assert choice.name == "trtllm_mha, with fallbacks"
    assert str(choice).endswith("; decode rows of sliding layers run triton")
