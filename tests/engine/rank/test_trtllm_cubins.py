"""A kernel exists for everything that the adapter takes: FlashInfer's selection rules against the inventory of a published release.

The rules are those of `fmhaKernels.cuh` (0.7.2), read, not run: which of the kernels named here a GPU takes depends on its load.
The inventory is flashinfer-cubin 0.6.13's, the newest on the package index; 0.7's kernels are fetched when an image is built.
"""

from collections.abc import Iterator
from functools import cache

import pytest

from deploy.models.resolve import resolve
from engine.errors import CheckpointError
from engine.geometry import KVGroup, kv_groups, read_geometry
from tests.nano.model_shapes import PUBLIC
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

Kernel = tuple[str, str, str, str]  # head dim, mask, tokens of a page, the rest of its name
TILES = (8, 16, 32, 64, 128)
FULL, SLIDING = "Causal", "SlidingOrChunkedCausal"
MOST_QUERIES = 8  # of a row, drafts included


@cache
def inventory() -> frozenset[Kernel]:
    """Of the SM100 family; SM103 has some faster ones besides."""
    lines = (ROOT / "tests" / "support" / "trtllm_cubins.txt").read_text().splitlines()
    found = (line.split() for line in lines if not line.startswith("#"))
    return frozenset(
        (head, mask, page, rest) for family, head, mask, pages, rest in found if family == "Sm100f" for page in pages.split(",")
    )


def masks(group: KVGroup) -> Iterator[str]:
    """A window that no sequence is longer than yet is no window."""
    yield FULL
    if group.window is not None:
        yield SLIDING


def decode_kernels(group: KVGroup, page: str, ratio: int, q_len: int) -> Iterator[Kernel]:
    """Every kernel that rows of `q_len` queries may take: the smallest tile that holds a KV head's queries or, to fill the GPU, a
    smaller one that holds its heads; keys split over CTAs, or not."""
    largest = next(tile for tile in TILES if tile >= min(ratio * q_len, 128))
    for tile in (tile for tile in TILES if tile <= largest and (tile == largest or (q_len > 1 and tile >= ratio))):
        kind, part, split = ("SwapsAb", "", "MultiCtasKv") if tile <= 32 else ("KeepsAb", "", "MultiCtasKv")
        if tile > 32 and group.head_dim > 256:
            part, split = "HVPerCta256", "MultiCtasKvGmemSep"
        for mask in masks(group):
            yield f"H{group.head_dim}{part}", mask, page, f"{split}VarSeqQ{tile}Kv128Static{kind}ForGen"
            yield f"H{group.head_dim}{part}", mask, page, f"VarSeqQ{tile}Kv128Persistent{kind}ForGen"


def context_kernels(group: KVGroup, page: str) -> Iterator[Kernel]:
    """Every kernel that prefill chunks may take."""
    part = "HVPerCta256" if group.head_dim > 256 else ""
    for mask in masks(group):
        for scheduler in ("Static", "Persistent"):
            yield f"H{group.head_dim}{part}", mask, page, f"VarSeqQ128Kv128{scheduler}Context"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("member", PUBLIC)
def test_everything_we_claim_has_a_kernel(member: str, tp: int) -> None:
    """Each member, TP, page size and number of queries a row: prefill, and decode rows of every tile that might be chosen."""
    geometry = read_geometry(resolve(f"dummy:{member}"))
    try:
        groups = kv_groups(geometry, tp)
    except CheckpointError:
        pytest.skip(f"{member} does not divide by {tp}")
    for group in groups:
        ratio = geometry.heads // tp // group.kv_heads
        for page in ("16", "32", "64"):
            assert set(context_kernels(group, page)) <= inventory()
            for q_len in range(1, MOST_QUERIES + 1):
                assert set(decode_kernels(group, page, ratio, q_len)) <= inventory(), (member, tp, group, page, q_len)


def test_what_has_no_kernel_is_not_claimed() -> None:
    """Pages of 128 at head dim 512, and prefill with a window there, have none: the rules find that. A page has 64 at most."""
    full = KVGroup(0, "full", (0,), 1, 512, None)
    assert not set(decode_kernels(full, "dynamic", 8, 1)) & inventory()
    windowed = KVGroup(0, "sliding", (0,), 1, 512, 1024)
    assert not set(context_kernels(windowed, "32")) <= inventory()
