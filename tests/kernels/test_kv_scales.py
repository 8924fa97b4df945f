"""Scales of e4m3 pages: every op over stored K and V with scales against the same op over their products in fp32.

The reference runs here; the Triton kernels in `interpreted_*`, under the interpreter.
"""

import pytest
import torch
from torch import Tensor

from kernels.chunks import extend_tiles
from kernels.decode import DecodeScratch, decode_attention
from kernels.prefill import extend_attention
from kernels.qkv import qkv_post, query_dtype
from kernels.verify import verify_attention, verify_cut_of
from tests.support import interpreter
from tests.support.attention import E4M3, EPS

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-3  # of q and the softmax's weights, which kernels take in fp16 over e4m3 pages
FAULT = 100 * TOLERANCE
HEADS, KV_HEADS, D, PAGE, PAIRS = 4, 2, 32, 16, 16
LENGTHS = (40, 5)


def given() -> Tensor:
    return torch.tensor([[0.03, 0.11], [1.9, 0.26]])


def others() -> dict[str, Tensor]:
    return {"another head's": given().flip(1), "K's for V": given().flip(0), "none": torch.ones(2, 2)}


def pages(scales: Tensor, stored: Tensor) -> Tensor:
    """[pages, 2, kv_heads, page, d] as fp32 numbers."""
    return stored.float() * scales[None, :, :, None, None]


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stored pages, raw q, k and v of a row for each of LENGTHS, table, last positions."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(3)
    numbers = torch.randn(6, 2, KV_HEADS, PAGE, D, generator=draw) / given()[None, :, :, None, None] / 2
    raw = torch.randn(2, (HEADS + 2 * KV_HEADS) * D, generator=draw)
    table = torch.tensor([[1, 2, 3], [4, 0, 0]], dtype=torch.int32)
    return numbers.to(E4M3), raw, table, torch.tensor(LENGTHS, dtype=torch.int32) - 1


def of_queries(kind: str, pool: Tensor, scales: Tensor | None) -> Tensor:
    """`verify`: three queries a row; `extend`: a chunk of a row's last five."""
    _, _, table, last = inputs()
    count = 3 if kind == "verify" else 5
    q = torch.randn(2 * count, HEADS, D, generator=torch.Generator(torch.get_default_device()).manual_seed(4)) / D**0.25
    if scales is not None:  # as `qkv_post` writes it
        q = q * scales[0].repeat_interleave(HEADS // KV_HEADS)[:, None]
    q = q.to(query_dtype(q, pool))
    out = torch.empty_like(q)
    if kind == "verify":
        positions = (last[:, None] + torch.arange(1 - count, 1, dtype=torch.int32)).flatten()
        _, tile = verify_cut_of(pool, 2, count * HEADS // KV_HEADS, 3)
        scratch = DecodeScratch(2, HEADS, KV_HEADS, D, 4 * count, torch.get_default_device())
        verify_attention(q, pool, table, positions, None, scratch, out, 2, tile, scales)
    else:
        chunks = torch.tensor([(slot, slot * count, end - count + 1, count) for slot, end in enumerate(last.tolist())])
        extend_attention(q, pool, table, extend_tiles(chunks.int(), 8, 2 * count), None, out, scales=scales)
    return out


@pytest.mark.parametrize("kind", ["verify", "extend"])
def test_queries_over_scaled_pages(kind: str) -> None:
    """They give what those over the products give; with other scales they do not."""
    stored, *_ = inputs()
    want = of_queries(kind, pages(given(), stored), None)
    assert (of_queries(kind, stored, given()) - want).abs().max() < TOLERANCE
    for name, scales in others().items():
        assert (of_queries(kind, stored, scales) - want).abs().max() > FAULT, name


def step(pool: Tensor, scales: Tensor | None, *, appends: bool = True) -> Tensor:
    """A decode row for each of LENGTHS, which appends K and V or reads those that are there."""
    _, raw, table, last = inputs()
    draw = torch.Generator(torch.get_default_device()).manual_seed(5)
    angles, norms = torch.randn(2, PAIRS, generator=draw), torch.rand(2, D, generator=draw) / D**0.25 + 0.2
    scratch = DecodeScratch(2, HEADS, KV_HEADS, D, 4, torch.get_default_device())
    out, rope = torch.empty(2, HEADS * D), torch.cat((angles.cos(), angles.sin()), 1)
    if not appends:
        ends = EPS, None, scratch, out, 2
        decode_attention(raw[:, : HEADS * D].contiguous(), pool, table, last, rope, norms[0], None, *ends, scales=scales)
        return out
    decode_attention(raw, pool, table, last, rope, *norms, EPS, None, scratch, out, 2, scales=scales)
    appended = torch.empty(2, HEADS, D), pool.clone().zero_()
    slots = torch.arange(2, dtype=torch.int32)
    qkv_post(raw, appended[1], table, slots, last, rope, *norms, EPS, appended[0], scales=scales)
    places = table[slots, last // PAGE].long(), last.long() % PAGE
    ours, theirs = (each.float()[places[0], :, :, places[1]] for each in (pool, appended[1]))
    assert torch.allclose(ours, theirs, rtol=1e-4 if scales is None else 1 / 7, atol=1e-5)  # on a GPU sums of other orders: a step
    return out


def test_a_decode_step_over_scaled_pages() -> None:
    """K and V are divided when they are appended, by decode rows as by other rows: each is a rounding of the exact one. The output
    is that over the products."""
    stored, _, table, last = inputs()
    exact = pages(given(), stored)
    step(exact, None)
    held = stored.clone()
    out = step(held, given())
    for slot, position in enumerate(last.tolist()):
        at = int(table[slot, position // PAGE]), slice(None), slice(None), position % PAGE
        want, found = exact[at], pages(given(), held)[at]
        assert ((found - want).abs() <= want.abs() / 15 + given()[:, :, None] / 500).all()
        assert not ((pages(given().flip(1), held)[at] - want).abs() <= want.abs() / 15).all()
    want = step(pages(given(), held), None, appends=False)
    assert (out - want).abs().max() < TOLERANCE
    assert (step(held, given(), appends=False) - want).abs().max() < TOLERANCE
    for name, scales in others().items():
        assert (step(held.clone(), scales) - want).abs().max() > FAULT, name


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_queries = test_queries_over_scaled_pages
interpreted_decode_step = test_a_decode_step_over_scaled_pages
