"""Prompts with pictures, videos and clips through scheduler, plans and ranks, in fp32, against transformers' whole models.

Pictures lie over the edges of pages, chunks and windows, or end and begin there; they begin and end prompts; one is longer than a
window, one is asked about twice, and some have the largest budget; prompts run beside each other, so that chunks of several, with
pictures or without, are one step.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from engine.audio_geometry import read_audio
from engine.config import EngineConfig
from engine.core import scheduler
from engine.core.loop import make_scheduler
from engine.core.scheduler import StepBuilder
from engine.geometry import Geometry, read_geometry
from engine.plan import StepPlan, StepResult
from engine.protocol import Counters, SamplingParams
from engine.rank.batch import Chunk, SoftTokens
from engine.rank.builder import build, load_rank
from engine.rank.models import vision
from engine.rank.runner import Runner
from engine.rank.stages.encode_stage import EncodeStage
from engine.rank.step import StepBuffers
from tests.conftest import Nano
from tests.nano.model_shapes import AudioShape, ModelShape, VisionShape
from tests.nano.nano_shapes import SHAPES
from tests.nano.random_models import write
from tests.nano.random_weights import draw
from tests.support.engine.drive import Answer, Request, ask_all, attached, booted, still
from tests.support.engine.media import MEMORY
from tests.support.engine.plan_stream import different_tokens, logprob_error
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of, padded_shapes
from tests.support.engine.scheduling import request_of
from tests.support.engine.threads import ThreadParallel, run_ranks
from tests.support.judge.near_tie import Match, compare
from tests.support.judge.oracle import judge, load_oracle
from tests.support.judge.pictures import Prompt, as_inputs, pictures

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("forked_groups")]

_wide = VisionShape(36, 3399, layers=3, heads=3, head_dim=20, mlp=52, clipped=True)
_narrow = VisionShape(52, 3360, layers=1, heads=1, head_dim=36, mlp=44, clipped=True)
_deep = VisionShape(44, 3366, layers=3, heads=5, head_dim=12, mlp=60, standardize=True)
_flat = VisionShape(76, 3375, layers=1, heads=2, head_dim=28, mlp=20, standardize=True)
_tower = AudioShape(40, layers=1, heads=5, channels=(128, 12), output=28)
_small_tower = AudioShape(24, layers=3, heads=3, channels=(128, 20), output=36)

ODD: dict[str, ModelShape] = {
    member: replace(SHAPES[member], **sizes)
    for member, sizes in {
        "e2b": {"hidden": 56, "groups": 3, "sliding": 1, "mlp": 88, "ple": 24, "window": 45, "vision": _wide, "audio": _tower},
        "e4b": {"hidden": 104, "heads": 6, "kv_heads": 3, "mlp": 72, "ple": 8, "vision": _narrow, "audio": _small_tower},
        "12b": {"hidden": 88, "heads": 4, "mlp": 104, "window": 77, "vision": VisionShape(36, 1133), "audio": AudioShape(600)},
        "26b-a4b": {"hidden": 72, "groups": 2, "sliding": 2, "experts": 10, "top_k": 3, "moe_mlp": 40, "vision": _deep},
        "31b": {"hidden": 120, "heads": 6, "kv_heads": 3, "kv_heads_full": 2, "mlp": 56, "window": 51, "vision": _flat},
    }.items()
}


def odd_checkpoint(member: str, folder: Path) -> Path:
    """The odd checkpoint of a member, loaded and saved by transformers into `folder`, in many shards."""
    drafted = folder / "drafted"
    drafted.mkdir(parents=True)
    write(ODD[member], drafted, partial(draw, shape=ODD[member], seed=0), "float32")
    load_oracle(drafted).save_pretrained(folder / "saved", max_shard_size="1MB")
    transformers.Gemma4ImageProcessorPil().save_pretrained(folder / "saved")  # the other, and the 12B's, need torchvision
    return folder / "saved"


TOLERANCE = 1e-4
FAULT = 100 * TOLERANCE
PAGES = (200, 200)
GROUPS = {"e2b": 2, "31b": 4}  # ranks that compute the same plans
ASKED = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=3)


def prompts(member: str, geometry: Geometry) -> list[Prompt]:
    """With pictures over every edge: of pages (32), of chunks (64), of the window; at them; at both ends; without; of one twice."""
    ids = [at * 37 % 900 + 10 for at in range(400)]
    image, video = (SHAPES[member].media[f"<|{kind}|>"] for kind in ("image", "video"))
    small, wide, large, clip = pictures((4, 7), (2, 9), (9, 12) if geometry.bidirectional else (6, 10), (3, 2, 4))
    first = Prompt(ids[:36]).picture(small, image).text(ids[:32]).picture(wide, image).text(ids[:30])
    second = Prompt([]).picture(large, image).text(ids[5:150]).picture(small, image)
    third = Prompt(ids[: geometry.window - 5]).picture(wide, image).text(ids[9:12]).picture(clip, video).text(ids[3:9])
    fourth = Prompt(ids[:36]).picture(small, image).text(ids[:32]).picture(pictures((2, 9), seed=1)[0], image).text(ids[:30])
    return [first, second, third, Prompt(ids[:90]), fourth]


def heard(member: str, folder: Path) -> list[Prompt]:
    """With clips over edges of pages, chunks and the window, beside a picture and a video; none where the member hears nothing."""
    audio, ids, generator = read_audio(folder), [at * 37 % 900 + 10 for at in range(90)], torch.Generator().manual_seed(0)
    if audio is None:
        return []
    image, video, sound = (SHAPES[member].media[f"<|{kind}|>"] for kind in ("image", "video", "audio"))
    clips = [torch.randn((rows, audio.features), generator=generator) for rows in (90, 49)]
    (long, many), (short, few) = ((clip, audio.tokens(len(clip))) for clip in clips)
    first = Prompt(ids[:20]).clip(short, few, sound).text(ids[:5]).clip(long, many, sound).text(ids[:9])
    wide, film = pictures((2, 9), (3, 2, 4))
    second = Prompt(ids[:50]).clip(long, many, sound).picture(wide, image).clip(short, few, sound)
    return [first, second.text(ids[:70]).picture(film, video).text(ids[:3])]


@dataclass
class Served:
    """What requests gave, and the plans and results of their steps."""

    answers: dict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)


def serve(
    runner: Runner, config: EngineConfig, asked: list[Prompt], params: SamplingParams = ASKED, pages: tuple[int, ...] = PAGES
) -> Served:
    """All of them at once, to their ends."""
    scheduler = make_scheduler(config, pages)
    served = Served(counters=scheduler.requests.counters)
    for number, prompt in enumerate(asked):
        scheduler.requests.add(request_of(number, prompt.ids, params, media=MEMORY.place(prompt.media)))
    while scheduler.requests.unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        served.plans.append(plan)
        served.results.append(run(runner, plan))
        scheduler.commit(served.results[-1])
        for output in scheduler.requests.drain():
            answer = served.answers[output.id]
            assert output.error is None, output.error
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt += [entry for piece in output.prompt_logprobs for entry in piece.entries()]
    return served


@dataclass(frozen=True)
class Case:
    """A checkpoint, its prompts, its reference."""

    config: EngineConfig
    prompts: list[Prompt]
    oracle: transformers.PreTrainedModel

    def match(self, asked: list[Prompt], served: Served) -> Match:
        """All answers against transformers."""
        found, both_ways = Match(), read_geometry(Path(self.config.model)).bidirectional
        for number, prompt in enumerate(asked):
            ids = torch.tensor(prompt.ids + served.answers[number].tokens)
            # given as masks: a plain forward of transformers' 12B makes others than its generation
            spans = [span for item in prompt.media for span in item.spans] if both_ways else ()
            verdict = judge(self.oracle, ids, spans, as_inputs(self.oracle, prompt, len(ids)))
            found += compare(prompt.ids, served.answers[number], verdict)
        return found


@pytest.fixture(scope="module")
def case(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Of a nano member, or, as in "odd 31b", of one in other sizes that transformers wrote."""

    @cache
    def make(name: str) -> Case:
        member = name.removeprefix("odd ")
        folder = nano(member) if name == member else odd_checkpoint(member, tmp_path_factory.mktemp(name))
        config = config_of(folder, 1, max_seqs=4, max_len=1400, prefill_budget=64, pages=PAGES)
        return Case(config, [*heard(member, folder), *prompts(member, read_geometry(folder))], load_oracle(folder))

    return make


@pytest.mark.parametrize("member", list(ODD))
def test_checkpoints_that_transformers_wrote(case: Callable[[str], Case], member: str) -> None:
    """Sizes that no public model has, saved by transformers in shards, with its processor's file: the same within 1e-4."""
    it = case(f"odd {member}")
    assert len(list(Path(it.config.model).glob("model-*.safetensors"))) > 1
    match = it.match(it.prompts, serve(build(single(it.config), PAGES), it.config, it.prompts))
    print(f"odd {member}: {match}")
    assert match.wrong == 0
    assert match.worst < TOLERANCE
    assert match.judged >= 20


@pytest.mark.parametrize(("member", "seqs", "pages"), [("e2b", 8, 14), ("31b", 4, 12)])
def test_found_again_and_preempted(case: Callable[[str], Case], member: str, seqs: int, pages: int) -> None:
    """Prompts that the prefix cache has, pictures and all (to within one that is seen causally), and preempted ones: the same."""
    it = case(f"odd {member}")
    asked = [prompt for prompt in it.prompts if prompt.media and len(prompt.ids) < 150] * 2
    params = msgspec.structs.replace(ASKED, max_tokens=40, prompt_logprobs=None)
    config, few = msgspec.structs.replace(it.config, max_seqs=seqs), (60, pages)
    served = serve(build(single(config), few), config, asked, params, few)
    assert min(served.counters.hit_tokens - 400, served.counters.preemptions) > 0
    items = {tuple(prompt.ids): prompt.media for prompt in asked}
    found = [(one.cached, items[tuple(one.tokens[: one.prompt])]) for plan in served.plans for one in plan.admissions]
    assert any(item.first < cached < item.end for cached, media in found for item in media) == (member == "e2b")
    match = it.match(asked, served)
    print(f"odd {member}, found again: {match}")
    assert match.worst < TOLERANCE
    assert match.wrong == 0


@pytest.mark.parametrize("member", list(GROUPS))
def test_logits_are_transformers(case: Callable[[str], Case], member: str) -> None:
    """Every token is transformers' argmax, every logprob, of prompts too, within 1e-4 of its; at TP 2 or 4 as at 1."""
    it = case(member)
    asked = it.prompts[::2]
    served = serve(build(single(it.config), PAGES), it.config, asked)
    match = it.match(asked, served)
    print(f"{member}: {match}")
    assert match.wrong == 0
    assert match.worst < TOLERANCE
    assert match.judged >= 10
    replay(it.config, served, GROUPS[member])


def replay(config: EngineConfig, served: Served, size: int) -> None:
    """The same plans on a group of ranks give what one rank gave."""

    def on_thread(parallel: ThreadParallel) -> list[StepResult]:
        rank = load_rank(msgspec.structs.replace(config, tp=size), parallel, torch.device("cpu"), media=MEMORY.fd)
        runner = build(rank, PAGES)
        return [run(runner, plan) for plan in served.plans]

    results = run_ranks(size, on_thread)[0]
    assert different_tokens(results, served.results) == []
    assert logprob_error(results, served.results) < TOLERANCE


SIZES = ((7, 10), (14, 10), (14, 20), (20, 28), (28, 40))
SLOW = [*((member, size) for member in ODD for size in SIZES), *((member, (1, 1120)) for member in ("e2b", "e4b", "12b", "31b"))]


@pytest.mark.parametrize(
    ("member", "size"),
    [("12b", (28, 40)), *(pytest.param(member, size, marks=pytest.mark.slow) for member, size in SLOW)],
)
def test_budgets(case: Callable[[str], Case], member: str, size: tuple[int, int]) -> None:
    """A picture as large as each budget, up to one longer than windows and steps: one chunk, or many where it is seen causally."""
    it = case(f"odd {member}")
    match = Match()
    for seed in range(9):  # others where a router's near tie leaves no token to judge
        asked = [Prompt([5, 6, 7]).picture(pictures(size, seed=seed)[0], SHAPES[member].media["<|image|>"]).text([8, 9])]
        match += it.match(asked, serve(build(single(it.config), PAGES), it.config, asked))
        if match.judged:
            break
    print(f"odd {member}, {math.prod(size)} tokens: {match}")
    assert match.wrong == 0
    assert match.worst < TOLERANCE
    assert match.judged > 0


def test_a_group_of_processes(case: Callable[[str], Case]) -> None:
    """The same through core, rings and two ranks, all prompts at once, some of them preempted and encoded again."""
    it = case("31b")
    asked = [prompt for prompt in it.prompts if prompt.media] * 2
    config = msgspec.structs.replace(it.config, tp=2, max_seqs=8, pages=(80, 17), prefix_cache=False)

    async def main() -> Served:
        async with attached(group) as (client, _), asyncio.timeout(240):
            longer = msgspec.structs.replace(ASKED, max_tokens=64)
            requests = [Request(prompt.ids, longer, media=prompt.media) for prompt in asked]
            served = Served(dict(enumerate(await ask_all(client, requests, len(requests)))))
            load = await still(client)
            assert load.preemptions > 0
            ours, other = (status.encoder for status in group.status()[:2])
            assert ours[1:] == other[1:]  # of both ranks, but for the time
            assert (ours.images, ours.frames, ours.rows, ours.queries - ours.hits) == (4, 3, 196, 5)  # five items, each once
            assert min(ours.us, other.us, ours.hits - 10) > 0
            return served

    with booted(config) as group:
        match = it.match(asked, asyncio.run(main()))
    print(f"31b TP=2, {match}")
    assert match.wrong == 0
    assert match.worst < TOLERANCE


def test_thirty_pictures_in_one_batch(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text about 30 pictures of two sizes, in one step: they are one batch, and each answer is transformers'."""
    it, image, sizes = case("e2b"), SHAPES["e2b"].media["<|image|>"], list[int]()
    shown = [pictures((1, 2 + number % 2), seed=number)[0] for number in range(30)]
    asked = [Prompt([at * 37 % 900 + 10 for at in range(8)]).picture(one, image).text([40, 50, 60]) for one in shown]
    pieces = vision.VisionEncoder.pieces
    monkeypatch.setattr(vision.VisionEncoder, "pieces", lambda self, batch: (sizes.append(len(batch)), pieces(self, batch))[1])
    config = msgspec.structs.replace(it.config, max_seqs=30, prefill_budget=1024)
    match = it.match(asked, serve(build(single(config), PAGES), config, asked, ASKED, PAGES))
    assert sizes == [30]
    assert match.worst < TOLERANCE
    assert match.wrong == 0


@pytest.mark.parametrize("name", ["e2b", "odd 31b"])
def test_padded_steps_have_soft_tokens(case: Callable[[str], Case], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps padded as for graphs, with media and without, give the right logits. Planted fault: nobody says what rows of an image
    see."""
    it, params = case(name), msgspec.structs.replace(ASKED, prompt_logprobs=None)
    made, honest, steps = build(single(it.config), PAGES, padded_shapes(it.config)), StepBuffers.set_media, Counter[bool]()

    def counted(inputs: StepBuffers, soft: SoftTokens | None, chunks: tuple[Chunk, ...]) -> None:
        steps[soft is not None] += 1
        honest(inputs, soft, chunks)

    monkeypatch.setattr(StepBuffers, "set_media", counted)
    asked = [*it.prompts[::2], Prompt([at * 31 % 900 + 10 for at in range(90)])]
    match = it.match(asked, serve(made, it.config, asked, params))
    assert min(steps[True], steps[False]) > 1
    assert match.worst < TOLERANCE
    monkeypatch.setattr(StepBuffers, "set_media", lambda inputs, soft, _: honest(inputs, soft, ()))
    assert (it.match(asked, serve(made, it.config, asked, params)).worst < TOLERANCE) is (name == "e2b")


def test_what_does_not_fit_is_refused(case: Callable[[str], Case]) -> None:
    """A shape of no picture, or of other rows than there are places, or a kind without encoder, is refused: which."""
    it = case("31b")
    (good,) = MEMORY.place(it.prompts[0].media[:1])
    scheduler = make_scheduler(it.config, PAGES)
    change = partial(msgspec.structs.replace, good)
    long = change(length=1, spans=(), shape=(48, 48 * 2000, 3))
    wrong = [
        (change(shape=(*good.shape[:2], 1)), "no three colours"), (change(shape=(49, 48, 3)), "no multiples"),
        (change(shape=good.shape[::-1]), "no multiples"), (change(shape=()), "no multiples"),
        (change(shape=(48, 48, 3)), "does not fit its positions"),
        (long, "is longer than 1120"), (change(kind="audio"), "takes no audio"),
    ]  # fmt: skip
    for number, (item, complaint) in enumerate([*wrong, (good, "")]):
        scheduler.requests.add(request_of(number, it.prompts[0].ids, ASKED, media=(item,)))
        outputs = scheduler.requests.drain()
        assert [complaint in (output.error or "") for output in outputs] == [True] * bool(complaint), (complaint, outputs)


def late(patch: pytest.MonkeyPatch) -> None:
    """Soft tokens a place too late."""
    soft_tokens = EncodeStage.soft_tokens

    def rolled(self: EncodeStage, chunks: tuple[Chunk, ...]) -> SoftTokens | None:
        soft = soft_tokens(self, chunks)
        return soft and SoftTokens(soft.rows, soft.values.roll(1, 0))

    patch.setattr(EncodeStage, "soft_tokens", rolled)


def causal(patch: pytest.MonkeyPatch) -> None:
    """Spans seen like text."""
    right_chunks = scheduler._add_chunks

    def without_spans(step: StepBuilder) -> None:
        right_chunks(step)
        step.plan.chunks, step.plan.spans = [(*chunk[:4], 0, 0) for chunk in step.plan.chunks], []

    patch.setattr(scheduler, "_add_chunks", without_spans)


@pytest.mark.parametrize(("name", "fault"), [("e2b", late), ("odd 31b", causal)])
def test_faults_are_seen(
    case: Callable[[str], Case], name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults put logprobs off by 100 tolerances."""
    it = case(name)
    asked = [prompt for prompt in it.prompts if {item.kind for item in prompt.media} == {"image"}][:1]
    fault(monkeypatch)
    assert it.match(asked, serve(build(single(it.config), PAGES), it.config, asked)).worst > FAULT
