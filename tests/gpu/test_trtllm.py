"""The FlashInfer adapter on silicon: decode rows by trtllm-gen on SM100, by xqa on SM90, against Triton over the same pages.

Skips where FlashInfer is not installed. Where there is no network, carry two wheels and install them without their dependencies:

    flashinfer-python 0.7.2.post1 (62 MB), apache-tvm-ffi 0.1.15 (3.3 MB, for the machine's Python)
    python3 -m pip install --no-index --no-deps --target /tmp/site *.whl; export PYTHONPATH=/tmp/site
    FLASHINFER_CUDA_ARCH_LIST=9.0a python3 -m pytest tests/gpu/test_trtllm.py -x -q -s

On SM90 each variant (head dim, group, window, page, dtype) is compiled once by nvcc and ninja, in about five seconds; nothing is
fetched. On SM100 the kernels' binaries must be there (FLASHINFER_CUBIN_DIR).
"""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.rank.attention import trtllm
from engine.rank.attention.base import DecodePart
from engine.rank.attention.paged import PagedDecode
from engine.rank.attention.trtllm import FlashInfer, TrtllmDecode, TrtllmExtend, TrtllmScratch
from engine.rank.worker import build
from tests.conftest import Nano
from tests.gpu.exactness import RATIO, case, decoded, errors, run_judge, run_ranks
from tests.support.engine.kv_scene import FULL, SLIDING, Kind, Scene, attended, ours, relative, scene, theirs
from tests.support.engine.ranks import single
from tests.support.engine.recording import PAGES, config_of, request, serve, tokens_of

pytestmark = pytest.mark.gpu

TOLERANCE = 0.01  # bf16, of a row's norm: roundings of the softmax's weights and of the output, on both sides
POSITIONS = [1023, 1024, 1055, 1500, 2047, 0, -1, 31, 32, 511, 512]
KINDS = {
    "31b sliding": SLIDING,
    "31b full": FULL,
    "31b sliding, pages of 16": replace(SLIDING, page=16),
    "31b sliding, pages of 64": replace(SLIDING, page=64),
    "31b full, pages of 64": replace(FULL, page=64),
    "26b sliding": Kind(4, 2, 256, 1024),
    "26b full": Kind(4, 1, 512, None, sides=1),
    "e2b sliding, shared": Kind(8, 1, 256, 512, sides=0),
}


@pytest.fixture(scope="module")
def flashinfer() -> FlashInfer:
    """FlashInfer for this GPU, its version printed."""
    found = pytest.importorskip("flashinfer", reason="FlashInfer is not installed: see this file's first lines")
    made = trtllm.load(torch.device("cuda"), download=False)
    major, minor = torch.cuda.get_device_capability()
    print(f"FlashInfer {found.__version__}: {made.kernels} on {torch.cuda.get_device_name()} (SM{major}{minor})", flush=True)
    return made


def decode(it: Scene, part: DecodePart) -> Tensor:
    """What the scene's rows, all of them decode rows, give."""
    out = it.qkv.new_full((it.batch.rows, it.settings.heads * it.layer.head_dim), torch.nan)
    part.attend(it.qkv, it.layer, it.norms, it.batch, part.prepare(it.batch), out)
    return out


@pytest.mark.parametrize("name", KINDS)
def test_decode_rows(name: str, flashinfer: FlashInfer) -> None:
    """Rows at every edge of window and pages, and padding, equal Triton's, pages included; a wrong page shows in its row alone."""
    cuda = torch.device("cuda")
    one = scene(KINDS[name], POSITIONS, dtype=torch.bfloat16).copy(cuda)
    other = one.copy(cuda)
    part = TrtllmDecode(other.cache, other.settings, TrtllmScratch(flashinfer, other.settings))
    began = time.monotonic()
    found, want = decode(other, part), decode(one, PagedDecode(one.cache, one.settings))
    torch.cuda.synchronize()
    error = relative(found, want)
    print(f"{name}: {flashinfer.kernels} against Triton {error:.4f}, {time.monotonic() - began:.1f} s with compilation", flush=True)
    assert error < TOLERANCE
    assert torch.equal(one.cache.pool, other.cache.pool)
    assert torch.equal(decode(other, part), found)
    page = other.cache.group.page
    other.cache.table[3, 1280 // page] = other.cache.table[1, 992 // page]
    wrong = decode(other, part)
    print(f"{name}: with a wrong page {relative(wrong[3:4], want[3:4]):.2f}", flush=True)
    assert relative(wrong[3:4], want[3:4]) > 10 * TOLERANCE
    assert torch.equal(torch.cat([wrong[:3], wrong[4:]]), torch.cat([found[:3], found[4:]]))


def test_a_graph_follows_tables_and_positions(flashinfer: FlashInfer) -> None:
    """Captured with its tables' gathering, a step follows positions and pages that change on the device: the same bits as eager."""
    cuda = torch.device("cuda")
    it = scene(SLIDING, [1500, 40, 2000], dtype=torch.bfloat16).copy(cuda)
    part = TrtllmDecode(it.cache, it.settings, TrtllmScratch(flashinfer, it.settings))
    out = torch.empty(3, SLIDING.heads * SLIDING.head_dim, dtype=torch.bfloat16, device=cuda)

    def step() -> None:
        part.attend(it.qkv, it.layer, it.norms, it.batch, part.prepare(it.batch), out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    results = []
    for positions in ([1500, 40, 2000], [1501, -1, 1999], [1498, 39, -1], [1500, 40, 2000]):
        it.batch.positions.copy_(torch.tensor(positions))
        graph.replay()
        results.append(out.clone())
        step()
        assert torch.equal(out, results[-1]), positions
        assert not out[[row for row, position in enumerate(positions) if position < 0]].any()
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[1])


def test_chunks(flashinfer: FlashInfer) -> None:
    """On SM100, prefill chunks by trtllm-gen equal Triton's; elsewhere the part refuses to be made."""
    cuda = torch.device("cuda")
    one = scene(SLIDING, [1500], [(0, 700), (1000, 1300), (2047, 2050)], torch.bfloat16).copy(cuda)
    scratch = TrtllmScratch(flashinfer, one.settings)
    if flashinfer.kernels != "trtllm-gen":
        with pytest.raises(trtllm.ConfigError, match="SM100 family alone"):
            TrtllmExtend(one.cache, one.settings, scratch)
        pytest.skip("this GPU is none of the SM100 family: its kernels for prefill have not been run by us")
    other = one.copy(cuda)
    assert relative(attended(other, theirs(other, scratch)), ours(one)) < TOLERANCE


def test_the_engine_captures_it(flashinfer: FlashInfer, nano: Nano) -> None:
    """A nano model served with FlashInfer's decode rows: captured graphs give the eager steps' tokens and hidden bits."""
    tokens, hashes = [], []
    for graphs in (False, True):
        settings = {"device": "cuda", "dtype": "bfloat16", "graphs": graphs, "attention_decode": "trtllm_mha"}
        config = config_of(nano("31b"), 1, **settings)
        runner = build(single(config), PAGES)
        if graphs:
            runner.capture()
        _, results = serve(runner, config, [[request(number) for number in range(first, first + 4)] for first in (0, 4, 8)])
        tokens.append(tokens_of(results))
        hashes.append(runner.state_hash)
    assert len(tokens[0]) > 100
    assert tokens[0] == tokens[1]
    assert hashes[0] == hashes[1]


def test_a_nano_model(flashinfer: FlashInfer) -> None:
    """End to end in bf16 the nano 31B is as near to fp32 with FlashInfer's decode rows as with Triton's; a wrong page is not."""
    settings = case("random:31b", 8, 400, 120, 24)
    truth = run_judge("cuda", {key: value for key, value in settings.items() if key != "decodes"}, "float32", 120.0)
    asked = {**settings, "dtype": "bfloat16"}
    triton, found = (run_ranks(1, {**asked, "attention_decode": name}, 240.0) for name in ("triton", "trtllm_mha"))
    bound = RATIO * errors(decoded(triton, settings), decoded(truth, settings))[0]
    mean = errors(decoded(found, settings), decoded(truth, settings))[0]
    print(f"nano 31b decode rows, mean logprob error: {flashinfer.kernels} {mean:.5f}, bound by Triton's {bound:.5f}", flush=True)
    assert mean < bound
    for fault in ("sliding", "full"):
        broken = run_ranks(1, {**asked, "attention_decode": "trtllm_mha", "fault": fault}, 240.0)
        assert errors(decoded(broken, settings), decoded(truth, settings))[0] > bound, fault


def test_the_31b_shape(flashinfer: FlashInfer) -> None:
    """The 31B's own shape with random weights, one GPU: FlashInfer's decode rows give Triton's logprobs to bf16's noise."""
    if torch.cuda.mem_get_info()[0] < 90 << 30:
        pytest.skip("the 31B needs 62 GB of weights on one GPU")
    settings = {**case("dummy:31b", 2, 1400, 40, 24), "dtype": "bfloat16"}
    triton, found, broken = (
        run_ranks(1, {**settings, **each}, 400.0)
        for each in (
            {"attention_decode": "triton"},
            {"attention_decode": "trtllm_mha"},
            {"attention_decode": "trtllm_mha", "fault": "full"},
        )
    )
    mean, off = (errors(decoded(each, settings), decoded(triton, settings))[0] for each in (found, broken))
    print(f"31b shape, decode rows: {flashinfer.kernels} against Triton {mean:.5f}, with a wrong page {off:.4f}", flush=True)
    assert mean < 0.05
    assert off > 3 * mean
