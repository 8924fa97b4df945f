"""Worker processes on GPUs of their own: symmetric memory and NCCL inside the group, one hash, and the CPU's tokens."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult
from engine.protocol import GenerateRequest, pack_tokens
from engine.rank.builder import build
from tests.conftest import Nano
from tests.gpu.exactness import DEVICE, RANKS
from tests.nano.nano_shapes import SHAPES
from tests.support.engine import drafters
from tests.support.engine.answers import answers, requests, texts
from tests.support.engine.media import MEMORY
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.plans import encoded
from tests.support.engine.ranks import Ranks, run, single
from tests.support.engine.recording import PAGES, Recording, config_of, record, replay_in_step, request, tokens_of
from tests.support.judge.pictures import Prompt, pictures

pytestmark = [pytest.mark.gpu4, pytest.mark.timeout(900)]  # each boot may compile


@pytest.fixture(scope="module")
def recording(nano: Nano) -> Recording:
    return record(nano("31b"))


@pytest.fixture(scope="module")
def folders(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A model that sees, and its drafter: a trained one, and one of random weights."""
    drafter = drafters.fill(nano("e2b"), tmp_path_factory.mktemp("drafter"))
    return {"31b": (resolve("nano:31b"), resolve("nano:31b-assistant")), "e2b": (nano("e2b"), drafter)}


def shown(member: str, seed: int = 0) -> list[GenerateRequest]:
    """About one picture, two, and a video."""
    image, video = (SHAPES[member].media[f"<|{kind}|>"] for kind in ("image", "video"))
    ids, (small, wide, clip) = [at * 37 % 900 + 10 for at in range(40)], pictures((4, 5), (2, 9), (3, 2, 4), seed=seed)
    first, second, third = Prompt(ids[:20]).picture(small, image), Prompt([]).picture(wide, image), Prompt(ids).picture(clip, video)
    prompts = [first.text(ids[:9]), second.text(ids[:5]).picture(small, image).text(ids[:9]), third.text(ids[:3])]
    return [
        msgspec.structs.replace(request(number), prompt=pack_tokens(prompt.ids), media=MEMORY.place(prompt.media))
        for number, prompt in enumerate(prompts, start=20)
    ]


def test_ranks_on_gpus_compute_what_one_cpu_does(recording: Recording) -> None:
    """In fp32, ranks on GPUs give the CPU's tokens and, to 1e-3, its logprobs; hashes, hidden bits included, always agree."""
    with Ranks(config_of(recording.folder, RANKS, device="cuda")) as ranks:
        ranks.boot(PAGES)
        results, hashes = replay_in_step(ranks, recording.plans, recording.masks)
        times = [status.busy_us for status in ranks.statuses()]
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


@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_drafts_and_pictures(folders: dict[str, tuple[Path, Path]], member: str) -> None:
    """In fp32, ranks on GPUs that draft give the texts that one CPU gives without drafts, about pictures too, which they share; all
    hashes agree after every step. Other pictures give other texts."""
    folder, drafter = folders[member]
    sizes = {"pages": (90, 40), "prefill_budget": 128}
    asked, alone = [*requests(), *shown(member)], config_of(folder, 1, **sizes)
    given_by = (
        answers(partial(run, build(single(alone), alone.pages)), alone, [*requests(), *shown(member, seed)]) for seed in (0, 1)
    )
    expected, other = (texts(given) for given, *_ in given_by)
    config = config_of(folder, RANKS, device=DEVICE, mtp={"model": str(drafter), "drafts": 3}, **sizes)
    hashes = list[list[int]]()
    with Ranks(config) as ranks:
        ranks.boot(config.pages)

        def step(plan: StepPlan, masks: bytes) -> StepResult:
            ranks.submit(plan, masks)
            result = ranks.result()
            hashes.append(ranks.hashes(plan.step))
            return result

        given, plans, _ = answers(step, config, asked)
        figures = [status.encoder for status in ranks.statuses()]
    assert all(len(set(step)) == 1 for step in hashes)
    assert texts(given) == expected != other
    assert sum(bool(plan.encodes) for plan in plans) >= 3
    assert all(min(figure.images, figure.frames) > 0 for figure in figures)
    assert member == "e2b" or sum(output.accepted for outputs in given.values() for output in outputs) > 0
