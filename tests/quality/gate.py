"""The quality gate: held-out exercises answered by a real engine group, graded, and held to transformers' own greedy answers.

An answer differs where transformers, given the answer's own tokens so far, would have said another token; it is a tie, and no
difference, where the logits of both lie within `Setup.tie`, or where a router chose an expert by less than `oracle.ROUTER_MARGIN`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from cluster.children import Command, child_command
from cluster.group import Group
from deploy.models.resolve import resolve
from engine.config import EngineConfig, engine_config
from engine.front.text import TextProcessor
from engine.geometry import kv_groups, read_geometry
from engine.protocol import SamplingParams
from tests.support.engine.drive import Request, ask_all, attached, booted, still
from tests.support.judge.oracle import judge
from training.exercise_form import LONGEST_REPLY, Exercise
from training.exercises import SKILLS, drawing, exam, right, skills

AT_ONCE = 48
PASS = 0.95  # of the questions that must be answered right
ROUNDED = 0.5  # logits nearer than this may fall either way where activations, or K and V, are rounded to eight bits
SHARE = 0.05  # of the stories that a fault must change
Verdict = Literal["same", "tie", "differs"]


@dataclass(frozen=True)
class Setup:
    """How a group is run. tight: so few full-attention pages that sequences are preempted. graphs: off where a fault is planted in
    Python, which a captured step does not run again. rounds: the format rounds activations, or K and V."""

    name: str
    tp: int = 1
    budget: int = 256
    tight: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    page: int = 32
    graphs: bool = True
    kv_dtype: str = "auto"
    head: str = "bf16"
    weights: str = "auto"
    rounds: bool = False

    @property
    def tie(self) -> float:
        """Logits nearer than this may fall either way. fp32: another order of sums; bf16: half a step of a logit near 30."""
        if self.rounds:
            return ROUNDED
        return 1e-4 if self.dtype == "float32" else 0.125

    def config(self, folder: Path, longest: int) -> EngineConfig:
        """`longest`: tokens of the longest prompt and its answer."""
        groups = kv_groups(read_geometry(folder), self.tp, self.page)
        full = 5 * longest // 4 // self.page + 2
        pages = tuple(AT_ONCE * (group.worst_pages(longest) + 1) + 4 if group.window else full for group in groups)
        return engine_config(
            model=str(folder),
            tp=self.tp,
            device=self.device,
            dtype=self.dtype,
            max_seqs=AT_ONCE,
            max_len=longest,
            prefill_budget=self.budget,
            page=self.page,
            pages=pages if self.tight else None,
            graphs=self.graphs,
            kv_dtype=self.kv_dtype,
            head=self.head,
            weights=self.weights,
        )


SETUPS = (
    Setup("TP=1"),
    Setup("TP=2", tp=2),
    Setup("TP=4", tp=4),
    Setup("chunks of 64", budget=64),
    Setup("chunks of 1024", budget=1024),
    Setup("pages of 16, preempted", page=16, tight=True),
    Setup("bf16", dtype="bfloat16"),
)


@dataclass(frozen=True)
class QuestionSet:
    """The questions put to one member: exercises and their prompts' token ids."""

    folder: Path
    text: TextProcessor
    exercises: list[Exercise]
    prompts: list[list[int]]

    @classmethod
    def of(cls, member: str, questions: Mapping[str, int], seed: int, folder: Path | None = None) -> "QuestionSet":
        """`questions`: how many of each skill; `folder`: the member in another format."""
        folder = folder or resolve(f"nano:{member}")
        text, geometry = TextProcessor.load(folder), read_geometry(folder)
        draw = drawing(random.Random(f"{seed} {member}"), geometry.window, text)
        exercises = [each for skill, size in questions.items() for each in exam(skill, draw, size)]
        return cls(folder, text, exercises, [each.prompt(text) for each in exercises])

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and an answer."""
        return max(map(len, self.prompts)) + LONGEST_REPLY


@dataclass(frozen=True)
class Run:
    """What a group answered: token ids of each answer, its last one included; preemptions; seconds from boot to the last answer."""

    answers: list[list[int]]
    preemptions: int
    seconds: float


def answer(question_set: QuestionSet, setup: Setup, command: Command = child_command) -> Run:
    """All questions through a real group: core, ring and ranks; `command` starts its processes (faults are planted there)."""
    config = setup.config(question_set.folder, question_set.longest)
    began = time.monotonic()
    with booted(config, command) as group:
        answers, preemptions = asyncio.run(_ask(group, question_set))
    return Run(answers, preemptions, time.monotonic() - began)


async def _ask(group: Group, question_set: QuestionSet) -> tuple[list[list[int]], int]:
    params = SamplingParams(max_tokens=LONGEST_REPLY, stop_ids=question_set.text.eos_ids)
    async with attached(group) as (client, _):
        answers = await ask_all(client, [Request(prompt, params) for prompt in question_set.prompts], AT_ONCE)
        load = await still(client)
    assert all(each.end in ("stop", "length") for each in answers), Counter(each.end for each in answers)
    assert [pool.used for pool in load.pools] == [0] * len(load.pools)
    return [each.tokens for each in answers], load.preemptions


@dataclass
class Judge:
    """transformers' opinion of answers, each asked once. `model`: the member in fp32, on the device where it shall compute."""

    question_set: QuestionSet
    model: PreTrainedModel
    _gaps: dict[tuple[int, tuple[int, ...]], tuple[float, bool]] = field(default_factory=dict)

    def verdict(self, number: int, tokens: list[int], tie: float) -> Verdict:
        """Of the answer to question `number`."""
        gap, sure = self._first_gap(number, tokens, tie)
        return "same" if gap == 0 else "tie" if gap <= tie or not sure else "differs"

    def _first_gap(self, number: int, tokens: list[int], tie: float) -> tuple[float, bool]:
        """How far below the likeliest token the first one lies that is not it; and whether no router was near a tie before it."""
        key = (number, tuple(tokens))
        if key not in self._gaps:
            prompt = self.question_set.prompts[number]
            found = judge(self.model, torch.tensor(prompt + tokens, device=self.model.device))
            logits = found.logits[len(prompt) - 1 : -1].cpu()
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            at = next((at for at, gap in enumerate(gaps.tolist()) if gap > 0), None)
            self._gaps[key] = (0.0, True) if at is None else (gaps[at].item(), found.sure >= len(prompt) + at)
        return self._gaps[key]

    def own_answer(self, number: int) -> list[int]:
        """transformers' greedy answer to question `number`, with its cache."""
        prompt = torch.tensor([self.question_set.prompts[number]], device=self.model.device)
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=LONGEST_REPLY,
                eos_token_id=list(self.question_set.text.eos_ids),
                pad_token_id=0,
                top_k=None,
                top_p=None,
                temperature=None,
            )
        return out[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Grades:
    """Of one run, per skill: questions, right answers, answers that differ, ties; and right answers of transformers itself."""

    asked: Counter[str]
    right: Counter[str]
    differ: Counter[str]
    ties: Counter[str]
    theirs: Counter[str]

    @property
    def differing(self) -> int:
        """Answers that are not transformers'."""
        return self.differ.total()

    @property
    def share(self) -> float:
        """Of all answers, those that differ."""
        return self.differ.total() / self.asked.total()

    def accuracy(self, skill: str) -> float:
        """Ours."""
        return self.right[skill] / self.asked[skill]


def grade(question_set: QuestionSet, run: Run, judge_: Judge, tie: float, *, theirs: bool = False) -> Grades:
    """`theirs`: also grade transformers' own answers, which are ours wherever ours are the same."""
    grades = Grades(*(Counter() for _ in range(5)))
    for number, (exercise, tokens) in enumerate(zip(question_set.exercises, run.answers, strict=True)):
        verdict, good = judge_.verdict(number, tokens, tie), _good(question_set, exercise, tokens)
        grades.asked[exercise.skill] += 1
        grades.right[exercise.skill] += good
        grades.differ[exercise.skill] += verdict == "differs"
        grades.ties[exercise.skill] += verdict == "tie"
        if theirs:
            same = verdict == "same"
            grades.theirs[exercise.skill] += good if same else _good(question_set, exercise, judge_.own_answer(number))
    return grades


def _good(question_set: QuestionSet, exercise: Exercise, tokens: list[int]) -> bool:
    return right(exercise, question_set.text.decode(tokens, skip_special_tokens=False))


def questions(member: str, size: int) -> dict[str, int]:
    """`size` of every skill that the member was trained on; four times as many stories: nearly tosses, they show disturbance."""
    return {**dict.fromkeys(skills(member), size), "story": 4 * size}


def untaught(member: str) -> str:
    """A line that names the skills which exercises know and the member was not trained on; nobody asks it those."""
    absent = [skill for skill in SKILLS if skill not in skills(member)]
    return f"{member} was not trained on, and is not asked: {', '.join(absent) or 'nothing'}"
