"""The real server at TP=4 against transformers: greedy tokens and logprobs, as the openai client reads them over HTTP."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch

from engine.front.text import TextProcessor
from tests.nano.random_models import model_folder
from tests.support.judge.oracle import judge, load_oracle, soft_cap
from tests.support.stack.serve_process import Stack

pytestmark = [pytest.mark.serve, pytest.mark.slow]  # a boot of its own; test_stack asks a model of the same shape

PROMPTS = 20
TOKENS = 64
TOP = 5
TOLERANCE = 1e-4  # fp32 on both sides, another order of sums
TIE = 1e-4  # logits nearer than this may fall either way


@dataclass(frozen=True)
class Expected:
    """transformers' own greedy continuation: token texts, each position's log-softmax [tokens, vocab]."""

    ids: list[int]
    logprobs: torch.Tensor
    logits: torch.Tensor


@dataclass
class Score:
    """What all comparisons gave."""

    tokens: int = 0
    same: int = 0
    ties: int = 0
    largest: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        return (
            f"token match rate {self.same / self.tokens:.4f} of {self.tokens}, ties {self.ties}, logprob difference largest "
            f"{self.largest:.1e}, mean relative {self.relative / self.same:.1e}"
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    args = {"model": str(model_folder("random:31b")), "prefill_budget": 96, "max_len": 1024}
    made = Stack(tmp_path_factory.mktemp("exact"), args=args)
    made.start()
    yield made
    try:
        assert made.end() == 0, made.said()
    finally:
        made.clean_up()


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("random:31b")


def continuations(folder: Path, prompts: list[list[int]]) -> list[Expected]:
    """Greedy, by transformers with its cache; then one full forward over each whole sequence."""
    model = load_oracle(folder)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
            )[0]
        logits = judge(model, whole).logits[len(prompt) - 1 : -1].double()
        found.append(Expected(whole[len(prompt) :].tolist(), logits.log_softmax(-1), logits))
    return found


def asked(stack: Stack, prompt: list[int]) -> openai.types.Completion:
    """One greedy completion of token ids, with logprobs."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    return client.completions.create(
        model="nano-31b", prompt=prompt, max_tokens=TOKENS, temperature=0, logprobs=TOP, extra_body=extra
    )


def compare(answer: openai.types.Completion, expected: Expected, text: TextProcessor, score: Score) -> None:
    """Token by token up to a first difference, which must be a tie of the reference's logits."""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    names = [text.pieces.bytes_of(token).decode("utf-8", "replace") for token in range(text.vocab_size)]
    for at, token in enumerate(expected.ids):
        score.tokens += 1
        if logprobs.tokens[at] != names[token]:
            near = [other for other, name in enumerate(names) if name == logprobs.tokens[at]]
            gap = min((expected.logits[at, token] - expected.logits[at, other]).item() for other in near)
            assert gap <= TIE, f"token {at}: {logprobs.tokens[at]!r} instead of {names[token]!r}, {gap:.1e} below"
            score.ties += 1
            return
        score.same += 1
        truth = expected.logprobs[at, token].item()
        off = abs(logprobs.token_logprobs[at] - truth)
        score.largest = max(score.largest, off)
        score.relative += off / max(abs(truth), 1e-9)
        best = expected.logprobs[at].max().item()
        score.largest = max(score.largest, abs(max(logprobs.top_logprobs[at].values()) - best))


def test_greedy_over_http_is_transformers_own(stack: Stack, folder: Path) -> None:
    """Tokens identical (or tied), logprobs within 1e-4, prompts several windows long in chunks, eight requests at a time."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    prompts = [[2, *(rng.randrange(300, 1000) for _ in range(rng.randrange(1, 400)))] for _ in range(PROMPTS)]
    text = TextProcessor.load(folder)
    expected = continuations(folder, prompts)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: asked(stack, prompt), prompts))
    score = Score()
    for answer, want in zip(answers, expected, strict=True):
        compare(answer, want, text, score)
    print(f"31b, TP=4, HTTP, seed {seed}: {score}")
    assert score.largest <= TOLERANCE
    assert score.ties <= max(1, score.tokens // 2000)


@pytest.mark.parametrize("fault", ["another token in the prompt", "another soft cap"])
def test_the_comparison_notices(stack: Stack, folder: Path, fault: str) -> None:
    """Planted: one prompt token differs, or the cap is another: the same comparison is off by 100 times and more."""
    prompt = [2, *range(300, 340)]
    text = TextProcessor.load(folder)
    (want,) = continuations(folder, [prompt])
    sent = prompt
    if fault == "another token in the prompt":
        sent = [2, 999, *prompt[2:]]
    else:
        want = Expected(want.ids, (3 * soft_cap(want.logits, 10.0)).log_softmax(-1), want.logits)
    score = Score()
    try:
        compare(asked(stack, sent), want, text, score)
    except AssertionError as error:
        print(f"{fault}: {error}")
        return
    print(f"{fault}: {score}")
    assert score.largest > 100 * TOLERANCE
