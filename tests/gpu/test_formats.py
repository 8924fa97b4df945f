"""Nano models of every format on a GPU: logits beside those of the CPU, texts with drafts, and the 31B under a cap on memory."""

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from deploy.cli.sizing import in_format
from deploy.models.resolve import PUBLIC, resolve
from engine.geometry import read_geometry
from engine.memory import kv_budget, pages_of
from engine.protocol import GenerateRequest, Output, SamplingParams, pack_tokens
from engine.rank.builder import build
from engine.rank.parallel import Single
from tests.gpu import spmd
from tests.gpu.exactness import DEVICE, RATIO, errors
from tests.quality.gate import QuestionSet
from tests.support.engine.answers import answers, texts
from tests.support.engine.format_model import write_base
from tests.support.engine.quantised import saved, widths_of
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of

pytestmark = pytest.mark.gpu

KINDS = ("channel", "int8", "nvfp4", "int4-32", "int4-32-zero")
CASES = [*(("31b", kind) for kind in KINDS), ("26b-a4b", "channel"), ("26b-a4b", "int4-32"), ("e2b", "int4-32")]
GB = 10**9
NEARLY = 0.5  # a difference of logprobs that rounded activations make: the largest error of logits above is .5 to .7
PARTED = 4  # of twelve answers


def logits(folder: Path, prompts: list[list[int]], device: str, dtype: str, fault: str = "") -> list[Tensor]:
    """Of each prompt's last 12 positions, of which four are decoded: a CPU takes a tenth of a second a step."""
    more = {"folder": str(folder), "load": "safetensors", "prompts": prompts, "rows": 12, "decodes": 4, "out": "", "fault": fault}
    job = spmd.Job(rank=0, size=1, device=device, dtype=dtype, **more)
    at = torch.device(device)
    return spmd.run(job, spmd.build(job, Single(), at), Single(), at)


@pytest.mark.parametrize(("member", "kind"), CASES)
def test_logits_are_as_near_as_the_cpus(tmp_path: Path, member: str, kind: str) -> None:
    """In bf16 they are no further from the CPU's in fp32 than the CPU's own bf16 is; with a wrong page they are."""
    folder = saved(write_base(tmp_path / "base", member), tmp_path / "saved", kind=kind)
    vocab, rng = read_geometry(folder).vocab, random.Random(3)
    prompts = [[rng.randrange(300, vocab - 10) for _ in range(100)] for _ in range(2)]
    truth = logits(folder, prompts, "cpu", "float32")
    usual, found = (errors(logits(folder, prompts, device, "bfloat16"), truth) for device in ("cpu", DEVICE))
    wrong = errors(logits(folder, prompts, DEVICE, "bfloat16", "full")[1:], truth[1:])
    print(f"{member} {kind}: mean and largest {found[0]:.5f} {found[1]:.3f}; of the CPU {usual[0]:.5f} {usual[1]:.3f}", end="; ")
    print(f"a wrong page {wrong[0]:.5f}", flush=True)
    assert found[0] <= RATIO * usual[0]
    assert wrong[0] > RATIO * usual[0]


@pytest.mark.parametrize(("member", "kind"), [*(("31b", kind) for kind in KINDS), ("26b-a4b", "channel")])
def test_text_with_drafts_is_that_without(tmp_path: Path, member: str, kind: str) -> None:
    """Captured steps in fp32 of a trained member: answers to exercises, whose tokens are sure, with its own drafter. Where products
    round activations, a sum of another order may round one elsewhere, and that moves others, up to the format's own error: there a
    token may differ that is nearly as likely. Another answer's tokens are less likely."""
    trained = resolve(f"nano:{member}")
    widths = widths_of(trained) if kind.startswith("int4") else {}
    folder = saved(trained, tmp_path / "saved", kind=kind, ignore=tuple(name for name, width in widths.items() if width % 64))
    prompts = QuestionSet.of(member, {"sort": 4, "json": 4, "copy": 4}, 1, folder).prompts
    params = SamplingParams(max_tokens=40, logprobs=2)
    asked = [GenerateRequest(id=at, prompt=pack_tokens(prompt), params=params) for at, prompt in enumerate(prompts)]
    sizes = {"max_seqs": 16, "prefill_budget": 256, "max_len": 320, "pages": (112, 40)}
    found, accepted = [], 0
    for mtp in ({}, {"mtp": {"model": str(trained / "assistant"), "drafts": 3}}):
        config = config_of(folder, 1, device=DEVICE, **sizes, **mtp)
        made = build(single(config), config.pages)
        if made.capturable:
            made.capture()
        given, _, _ = answers(partial(run, made), config, asked)
        found.append(given)
        accepted = sum(output.accepted for outputs in given.values() for output in outputs)
    parted = [margin_where_they_part(found[0][at], found[1][at]) for at in found[0]]
    margins = [margin for margin in parted if margin is not None]
    print(f"{member} {kind}: {accepted} drafts accepted; answers part at margins of {margins}", flush=True)
    assert accepted > 0
    if kind.startswith("int4"):
        assert not margins
    assert len(margins) <= PARTED
    assert max(margins, default=0.0) < NEARLY
    others = [margin_where_they_part(found[0][at], found[1][(at + 1) % len(asked)]) for at in found[0]]
    assert max(margin for margin in others if margin is not None) > NEARLY


def margin_where_they_part(one: list[Output], other: list[Output]) -> float | None:
    """How much likelier the first different token was than the next one, in logprobs; None: they are equal."""
    tokens, others = ([token for output in outputs for token in output.tokens] for outputs in (one, other))
    logprobs = [each for output in one for each in output.logprobs]
    for token, theirs, held in zip(tokens, others, logprobs, strict=False):
        if token != theirs:
            (_, first), (_, second) = held.top
            return first - second
    return None


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="the cap is one of CUDA's allocator")
@pytest.mark.parametrize(("weights", "cap"), [("int4", 48 * GB), ("fp8", 80 * GB)])
def test_the_31b_runs_under_a_cap(weights: str, cap: int) -> None:
    """Sized for a card of that memory, with fp8 pages, prompts of 3000 tokens and captured decode steps stay below the cap."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        with in_format(PUBLIC / "31b", weights) as folder:
            sizes = {"dtype": "bfloat16", "kv_dtype": "fp8", "max_seqs": 8, "max_len": 8192, "prefill_budget": 2048, "pages": None}
            more = {"weights": weights, "load_format": "dummy", "language_model_only": True, "debug_hash": False}
            config = config_of(folder, 1, device="cuda", **sizes, **more)
            rank = single(config)
            pages = pages_of(config, kv_budget(config, cap, torch.cuda.memory_allocated() + (1 << 30)))
            config = msgspec.structs.replace(config, pages=pages)
            made = build(rank, pages)
            made.capture()
            params = SamplingParams(max_tokens=8)
            asked = [GenerateRequest(id=at, prompt=pack_tokens([at + 300] * 3000), params=params) for at in range(8)]
            given, _, preemptions = answers(partial(run, made), config, asked)
        peak = torch.cuda.max_memory_reserved()
        print(f"31b {weights}: {peak / GB:.1f} GB reserved at most, of {cap / GB:g}")
        assert all(len(tokens) == 8 for tokens, _, _ in texts(given).values())
        assert peak <= cap
        assert not preemptions
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
