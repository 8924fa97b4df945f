"""The memory arithmetic of the KV cache."""

import pytest

from engine.errors import ConfigError
from engine.geometry import KVGroup
from engine.memory import CPU_BYTES, cpu_budget, gpu_budget, pool_pages

pytestmark = pytest.mark.pure

SLIDING = KVGroup(0, "sliding", (0, 1), kv_heads=2, head_dim=256, window=1024)
FULL = KVGroup(1, "full", (2,), kv_heads=1, head_dim=512, window=None)
SLOTS, BUDGET, MAX_LEN = 8, 512, 8192
WINDOWS = SLOTS * (33 + 1) + 16 + 1  # ceil((1024 + 1) / 32) = 33


def asked(spare: int, max_len: int = MAX_LEN, slots: int = SLOTS) -> tuple[int, ...]:
    """Pages when `spare` bytes are left behind the windows."""
    spent = WINDOWS * SLIDING.page_bytes(2)
    return pool_pages((SLIDING, FULL), slots, max_len, BUDGET, spent + spare, 2)


def test_a_budget_is_the_share_less_what_is_taken() -> None:
    """In whole bytes; it may be below zero, and then nothing fits. The ranks of a CPU divide one bound."""
    assert gpu_budget(1000, 250, 0.9) == 650
    assert gpu_budget(1001, 0, 0.5) == 500
    assert gpu_budget(1000, 950, 0.9) == -50
    assert [cpu_budget(tp) for tp in (1, 4)] == [CPU_BYTES, CPU_BYTES // 4]


def test_sliding_by_need_and_full_by_what_is_left() -> None:
    """Sliding pages hold all windows and one prefill budget; every whole page that is left over is a full one."""
    page = FULL.page_bytes(2)
    assert asked(100 * page) == (WINDOWS, 100)
    assert asked(101 * page - 1) == (WINDOWS, 100)


def test_no_more_than_all_slots_can_fill() -> None:
    """With memory to spare no group gets more pages than `slots` sequences of `max_len` tokens fill, and the null page."""
    assert asked(1 << 40) == (WINDOWS, SLOTS * MAX_LEN // 32 + 1)
    assert asked(1 << 40, max_len=100) == (SLOTS * 4 + 1, SLOTS * 4 + 1)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 512])
def test_windows_and_a_chunk_always_fit(slots: int, chunk: int) -> None:
    """Whatever position each slot is at, its window's pages and one budget of chunks fit the sliding pool."""
    group = SLIDING
    for start in range(5000, 5000 + 64):
        decode = len(group.pages_for(start, start + 1))
        prefill = len(group.pages_for(start, start + chunk))
        pages, _ = asked(1 << 40, slots=slots)
        chunks = min(slots, BUDGET // chunk)
        assert (slots - chunks) * decode + chunks * prefill < pages, (start, chunk)


@pytest.mark.parametrize("spare", [-1, 0, 2 * FULL.page_bytes(2) - 1])
def test_too_little_memory_is_refused(spare: int) -> None:
    """Where not even one page of full attention fits beside the windows, the ConfigError says what was needed and what there is."""
    assert asked(2 * FULL.page_bytes(2)) == (WINDOWS, 2)
    with pytest.raises(ConfigError, match=r"does not fit: .* MiB are available .* 8 sequences \(max_seqs\)"):
        asked(spare)
