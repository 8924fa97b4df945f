"""What a rank checks before it serves: FlashInfer's parts against our own, each fault of theirs found; and what ranks agree on."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from deploy.models.resolve import resolve
from engine.attention.backend_entry import ROW_KINDS
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import Geometry, kv_groups, read_geometry
from engine.rank import builder, start_checks
from engine.rank.attention import trtllm
from engine.rank.attention.base import AttentionParts, PartSettings
from engine.rank.attention.trtllm import TrtllmDecode, TrtllmExtend, TrtllmScratch
from engine.rank.builder import load_rank
from engine.rank.parallel import Parallel, Single
from engine.rank.start_checks import ROWS, mismatches
from kernels import selfcheck
from tests.support.engine.threads import run_ranks
from tests.support.flashinfer_calls import PROCESSORS, KernelStandIn, pinned

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
TP = 4


@pytest.fixture(scope="module")
def geometry() -> Geometry:
    return read_geometry(resolve("dummy:31b"))


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)


class Faulty(KernelStandIn):
    """A kernel with a fault: `meddle` changes what a launch was given, by name."""

    def __init__(self, meddle: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._meddle = meddle

    def _run(self, given: dict[str, Any], starts: list[int]) -> None:
        self._meddle(given)
        super()._run(given, starts)


def found(geometry: Geometry, kernel: KernelStandIn) -> dict[tuple[str, str], float]:
    """Errors of the parts that the check finds wrong, by kind of rows and group."""
    settings = PartSettings(geometry.heads // TP, geometry.eps, (ROWS,), CPU)
    scratch = TrtllmScratch(pinned("0.7.2.post1", kernel), settings, 1 << 10)
    parts = AttentionParts(*(partial(part, settings=settings, scratch=scratch) for part in (TrtllmDecode, TrtllmExtend)))
    groups = kv_groups(geometry, TP)
    wrong = [mismatches(kind, geometry, groups, settings, parts) for kind in ROW_KINDS]
    return {(kind, groups[index].name): error for errors in wrong for (kind, index), error in errors.items()}


def narrower(given: dict[str, Any]) -> None:
    given["window_left"] -= given["window_left"] > 0


def no_window(given: dict[str, Any]) -> None:
    given["window_left"] = -1


def one_key_less(given: dict[str, Any]) -> None:
    given["seq_lens"] = (given["seq_lens"] - 1).clamp(min=1)
    given["cum_seq_lens_kv"] = None if given.get("cum_seq_lens_kv") is None else torch.cat(
        [given["seq_lens"].new_zeros(1), given["seq_lens"].cumsum(0).int()]
    )  # fmt: skip


def wrong_page(given: dict[str, Any]) -> None:
    tables = given["block_tables"].clone()
    tables[:, 5] = tables[:, 6]
    given["block_tables"] = tables


def sides_swapped(given: dict[str, Any]) -> None:
    given["key_cache"], given["value_cache"] = given["value_cache"], given["key_cache"]


EVERYTHING = {(kind, name) for kind in ("decode", "extend") for name in ("sliding", "full")}


def test_sound_kernels_pass(geometry: Geometry) -> None:
    """Kernels that answer rightly are not complained of, at the 31B's shapes, poison all around."""
    assert found(geometry, KernelStandIn()) == {}


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (narrower, {("decode", "sliding"), ("extend", "sliding")}),
        (no_window, {("decode", "sliding"), ("extend", "sliding")}),
        (one_key_less, EVERYTHING),
        (wrong_page, EVERYTHING),
        (sides_swapped, EVERYTHING),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_fault_is_found_where_it_is(
    geometry: Geometry, fault: Callable[[dict[str, Any]], None], where: set[tuple[str, str]]
) -> None:
    """A window off by one or left out, a key too few, a wrong page, K for V: found for the rows and layers that it harms, alone."""
    assert set(found(geometry, Faulty(fault))) == where


# ---- among ranks


def test_ranks_agree_on_what_any_of_them_found() -> None:
    """What one rank of four found, all leave out; what nobody found, nobody does."""
    names = [f"part {number}" for number in range(70)]

    def found_by(parallel: Parallel) -> set[str]:
        mine = {1: ["part 3"], 2: ["part 69"]}.get(parallel.rank, [])
        return start_checks.failed_on_any_rank(parallel, names, mine, CPU)

    assert run_ranks(4, found_by) == [{"part 3", "part 69"}] * 4


def boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank without weights, on a GPU, up to where its model is made."""
    monkeypatch.setattr(builder, "_filled", built)
    asked = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "attention_decode": "triton"}
    config = EngineConfig(model=str(resolve("dummy:31b")), tp=1, **asked)
    load_rank(config, Single(), torch.device("cuda", 0))


def built(*_: object) -> Any:
    raise NotImplementedError


def test_a_wrong_kernel_ends_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that nobody tried a kernel that fails its check is named before a model is made; a GPU that we know is not asked."""
    monkeypatch.setattr(selfcheck, "failures", lambda *_: ["the embedding (kernels.embed) is wrong by 0.5"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(ConfigError, match=r"nobody tried: the embedding \(kernels.embed\) is wrong by 0.5"):
        boot(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(NotImplementedError):
        boot(monkeypatch)
    assert not start_checks.is_untried(CPU)


def test_a_wrong_part_runs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong here (sliding decode rows) or on another rank (full ones) is left to triton, in words; nothing asked, nothing
    checked."""

    def narrow_rows(given: dict[str, Any]) -> None:
        if given["max_q_len"] == 1:
            narrower(given)

    kernel = Faulty(narrow_rows)
    monkeypatch.setattr(trtllm, "load", lambda *_, **__: pinned("0.7.2.post1", kernel))
    real = PartSettings
    monkeypatch.setattr(start_checks, "failed_on_any_rank", lambda _, names, mine, __: {*mine, names[1]})
    monkeypatch.setattr(start_checks, "PartSettings", lambda heads, eps, buckets, _: real(heads, eps, buckets, CPU))
    model = str(resolve("dummy:31b"))
    config = EngineConfig(model=model, tp=TP, device="cuda", dtype="bfloat16", attention_decode="trtllm_mha")
    failed, said = start_checks.check_attention(Single(), config, torch.device("cuda", 0))
    assert failed == {("decode", 0), ("decode", 1)}
    assert len(said) == 2
    assert re.fullmatch(r"trtllm_mha is wrong by [0-9.e-]+ for decode rows of sliding layers: triton in its place", said[0])
    assert said[1] == "trtllm_mha is wrong on another rank for decode rows of full layers: triton in its place"
    kernel.calls.clear()
    plain = EngineConfig(model="", tp=TP, device="cuda", dtype="bfloat16")
    assert start_checks.check_attention(Single(), plain, torch.device("cuda", 0)) == ((), ())
    assert not kernel.calls
