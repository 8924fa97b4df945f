"""The registry of attention backends: what one line in it brings about, from the settings to the router."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from cluster.attention_choice import choose_attention
from engine.attention import BACKENDS
from engine.attention.backend_entry import BackendEntry, Obstacle, Platform, RowKind
from engine.attention.flashinfer_files import FlashInferFiles
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.rank.attention import attention_backend
from engine.rank.attention.base import AttentionParts, PartSettings
from engine.rank.attention.paged import ExtendPlan, PagedDecode, PagedExtend
from engine.rank.batch import ForwardBatch
from engine.rank.kv import KVCache
from engine.rank.parallel import Single
from engine.rank.start_checks import check_attention
from tests.support.engine.kv_scene import Kind, attended, ours, scene
from tests.support.repo_rules import sources

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
CONFIG = EngineConfig(model="", device="cpu", dtype="float32", attention_decode="fake")


class FakeDecode(PagedDecode):
    """Our own decode rows, counted, and off by `error`."""

    rows = 0
    error = 0.0

    def attend(self, qkv: Tensor, *rest: Any) -> None:
        """As `AttentionPart.attend`."""
        super().attend(qkv, *rest)
        FakeDecode.rows += len(qkv)
        rest[-1].add_(self.error)


class CausalExtend(PagedExtend):
    """Our own, but that tokens never see each other both ways; counts its rows."""

    rows = 0

    def prepare(self, block: ForwardBatch) -> ExtendPlan:
        """As `AttentionPart.prepare`."""
        CausalExtend.rows += len(block.slots)
        return super().prepare(replace(block, last_seen=None))


def parts(settings: PartSettings, **_: bool) -> AttentionParts:
    """The fake backend's."""

    return AttentionParts(lambda cache: FakeDecode(cache, settings), lambda cache: CausalExtend(cache, settings))


def obstacles(kind: RowKind, platform: Platform) -> Iterator[Obstacle]:
    if kind == "extend":
        yield Obstacle("it has no chunks", "wait")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line, and the module of the parts."""
    monkeypatch.setitem(BACKENDS, "fake", BackendEntry("fake", "cpu", "fake_parts", obstacles))
    monkeypatch.setitem(sys.modules, "fake_parts", SimpleNamespace(parts=parts))
    monkeypatch.setattr(FakeDecode, "rows", 0)


SETTINGS = """
from engine.attention import BACKENDS, BackendEntry
BACKENDS["fake"] = BackendEntry("fake", "cpu", "fake_parts")
from deploy.settings import Settings
print(Settings.read({"model": "any", "attention_decode": "fake"}).attention_decode)
Settings.read({"model": "any", "attention_decode": "fakes"})
"""


def test_settings_take_the_names_of_the_registry() -> None:
    """A backend that is registered may be asked for, and stands in the complaint about one that is not."""
    done = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "fake\n")
    assert "expected reference or triton or trtllm_mha or fake" in done.stderr


def test_it_is_chosen() -> None:
    """Where it is asked for, and by default for the rows that nothing keeps it from; else its reason refuses, or is the group's."""
    asked = choose_attention(CONFIG, None, FlashInferFiles())
    assert (asked.decode, asked.extend) == ("fake", "reference")
    plain = choose_attention(EngineConfig(model="", device="cpu"), None, FlashInferFiles())
    assert (plain.decode, plain.extend) == ("fake", "reference")
    chunks = EngineConfig(model="", device="cpu", attention_extend="fake")
    with pytest.raises(ConfigError, match=re.escape("attention_extend: fake: it has no chunks (wait)")):
        choose_attention(chunks, None, FlashInferFiles())
    with pytest.raises(ConfigError, match="fake runs on the CPU; on a GPU triton is the backend"):
        choose_attention(CONFIG, (9, 0), FlashInferFiles())


def test_it_is_checked_at_start(nano: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decode rows are compared with our own in every group; off by a tenth, they are left out, in words."""
    config = msgspec.structs.replace(CONFIG, model=str(nano("31b")))
    assert check_attention(Single(), config, CPU) == (frozenset(), ())
    checked = FakeDecode.rows
    assert checked > 0
    monkeypatch.setattr(FakeDecode, "error", 0.1)
    failed, sentences = check_attention(Single(), config, CPU)
    assert failed == {("decode", 0), ("decode", 1)}
    said = r"fake is wrong by \S+ for decode rows of (sliding|full) layers: reference in its place"
    assert [bool(re.fullmatch(said, sentence)) for sentence in sentences] == [True, True]
    FakeDecode.rows = 0
    assert check_attention(Single(), EngineConfig(model="", device="cpu"), CPU) == ((), ())
    assert FakeDecode.rows == 0


def test_the_router_gives_it_its_rows() -> None:
    """Decode rows go to it and chunks do not; where its check failed, neither does."""
    it = scene(Kind(4, 2, 32, 300, page=16), [500, 40], [(0, 20)])
    shape = SimpleNamespace(heads=4, eps=1e-6)
    want = ours(it)

    make = partial(attention_backend, CONFIG, shape, KVCache([it.cache]), 1, it.settings.buckets)
    assert attended(it, make()).equal(want)
    assert FakeDecode.rows == 2
    assert attended(it, make(failed_checks={("decode", 0)})).equal(want)
    assert FakeDecode.rows == 2


def test_a_name_is_spelled_once() -> None:
    """In product code a backend's name is its entry's; "triton" is a package's name too."""
    for name in BACKENDS.keys() - {"fake", "triton"}:
        assert sum(path.read_text().count(f'"{name}"') for path in sources()) == 1, name


@pytest.mark.parametrize("bidirectional", [True, False])
def test_images_are_left_to_our_own(monkeypatch: pytest.MonkeyPatch, bidirectional: bool) -> None:
    """Where tokens see each other both ways, a step's chunks with such tokens go to our own part, others to the one asked for."""
    it = scene(Kind(4, 2, 32, 300, page=16), [500], [(0, 70), (100, 130)])
    it.cache.group = replace(it.cache.group, bidirectional=bidirectional)
    first, second = it.batch.chunks
    image = replace(it, batch=replace(it.batch, chunks=(replace(first, spans=((3, 60),)), second)))
    shape = SimpleNamespace(heads=4, eps=1e-6)
    chunks = EngineConfig(model="", device="cpu", attention_extend="fake")
    router = attention_backend(chunks, shape, KVCache([it.cache]), 1, it.settings.buckets)
    monkeypatch.setattr(CausalExtend, "rows", 0)
    causal, seen = ours(it), ours(image)
    assert attended(image, router).equal(seen)
    assert CausalExtend.rows == (0 if bidirectional else 100)
    assert attended(it, router).equal(causal)
    assert CausalExtend.rows == (100 if bidirectional else 200)
    assert seen.equal(causal) != bidirectional


def test_plain_torch_verifies_what_no_gpu_does() -> None:
    """A part without kernels has no cuts to make: the 12B's nine queries of 16 heads, more than a GPU takes at once."""
    it = scene(Kind(16, 1, 16, None), [40])
    PagedDecode(it.cache, replace(it.settings, width=9))
