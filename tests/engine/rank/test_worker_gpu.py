"""Worker processes on GPUs of their own: symmetric memory and NCCL inside the group, one hash, and the CPU's tokens."""

import pytest

from tests.conftest import Nano
from tests.gpu.exactness import RANKS
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.plans import encoded
from tests.support.engine.ranks import Ranks
from tests.support.engine.recording import PAGES, Recording, config_of, record, replay_in_step, tokens_of

pytestmark = [pytest.mark.gpu4, pytest.mark.timeout(900)]  # each boot may compile


@pytest.fixture(scope="module")
def recording(nano: Nano) -> Recording:
    return record(nano("31b"))


def test_ranks_on_gpus_compute_what_one_cpu_does(recording: Recording) -> None:
    """In fp32, ranks on GPUs give the CPU's tokens and, to 1e-3, its logprobs; hashes, hidden bits included, always agree."""
    with Ranks(config_of(recording.folder, RANKS, device="cuda")) as ranks:
        ranks.boot(PAGES)
        results, hashes = replay_in_step(ranks, recording.plans, recording.masks)
        times = [status.step_us for status in ranks.statuses()]
    print(f"last step {times} us, logprob error {logprob_error(results, recording.results):.2e}")
    assert all(len(set(step)) == 1 for step in hashes)
    assert tokens_of(results) == tokens_of(recording.results)
    assert logprob_error(results, recording.results) < 1e-3


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_bf16_ranks_agree_and_replay(recording: Recording, nano: Nano, member: str) -> None:
    """In bf16 every rank's hash agrees after every step, and a replay of the plans gives the same hashes and tokens."""
    runs = []
    for _ in range(2):
        with Ranks(config_of(nano(member), RANKS, device="cuda", dtype="bfloat16")) as ranks:
            ranks.boot(PAGES)
            runs.append(replay_in_step(ranks, recording.plans, recording.masks))
    assert all(len(set(step)) == 1 for step in runs[0][1])
    assert encoded(runs[0][0]) == encoded(runs[1][0])
    assert runs[0][1] == runs[1][1]
