"""What the trained drafter wins on this machine: `python -m tests.bench.nano_drafts`; a sequence at a time, on four ranks."""

import random
import sys
import time
from collections.abc import Sequence

from deploy.models.resolve import resolve
from engine.core.loop import make_scheduler
from engine.protocol import SamplingParams
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.ranks import Ranks
from tests.support.engine.recording import config_of
from tests.support.engine.scheduling import request_of
from training.exercises import exam
from training.train import ExampleBuilder, TrainingExample

PAGES, RANKS = (40, 16), 4
SKILLS = ("describe", "nested", "json", "add")


def measured(examples: Sequence[TrainingExample], drafts: int) -> tuple[float, float]:
    """Milliseconds a token behind the first one, and tokens a step."""
    mtp = {"mtp": {"model": str(resolve("nano:31b-assistant")), "drafts": drafts}} if drafts else {}
    config = config_of(resolve("nano:31b"), RANKS, max_len=512, pages=PAGES, debug_hash=False, **mtp)
    scheduler, tokens, steps, seconds = make_scheduler(config, PAGES), 0, 0, 0.0
    with Ranks(config) as ranks:
        ranks.boot(PAGES)
        for number, example in enumerate(examples, 1):
            prompt, reply = example.ids[: example.start], example.ids[example.start :]
            params = SamplingParams(max_tokens=len(reply) + 8, temperature=0.0, stop_ids=(106, 50))
            scheduler.requests.add(request_of(number, prompt, params))
            given: list[int] = []
            while scheduler.requests.unfinished:
                plan, began = scheduler.schedule(), time.monotonic()
                assert plan is not None
                ranks.submit(plan, b"")
                result = ranks.result()
                seconds, steps = seconds + (time.monotonic() - began) * bool(given), steps + bool(given)
                scheduler.commit(result)
                given += [token for output in scheduler.requests.drain() for token in output.tokens]
            assert given == reply, number
            tokens += len(given) - 1
    return 1000 * seconds / tokens, tokens / steps


def main() -> None:
    """Twice, since other work on the machine shows."""
    builder = ExampleBuilder.of(resolve("nano:31b"), SHAPES["31b"])
    draw = builder.draw(random.Random("bench"))
    examples = [builder.example(exam(skill, draw, 1)[0]) for skill in SKILLS]
    for drafts in (0, 1, 2, 3, 5) * 2:
        milliseconds, tokens = measured(examples, drafts)
        sys.stdout.write(f"{drafts} drafts: {milliseconds:.1f} ms a token, {tokens:.2f} tokens a step\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
