"""Images, video and audio in the prompts of random worlds, and what a step may compute and encode of them."""

import random
from array import array
from typing import TYPE_CHECKING

import msgspec

from engine.core.pending import MediaUses
from engine.core.scheduler import Scheduler
from engine.plan import StepPlan
from engine.protocol import MediaEnd, PlacedItem, pack_tokens
from tests.support.engine.draws import chance, mixed
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.plans import decode_rows

if TYPE_CHECKING:
    from tests.support.engine.worlds import World


def show_media(world: "World") -> None:
    """Media in two prompts of three: items of two contents, often at the same places."""
    for number, request in enumerate(world.requests):
        if len(request.tokens) and chance(0.7, world.seed, number, 10):
            media, tokens = draw_media(world.seed, number, len(request.tokens)), request.tokens
            for item in media:
                tokens[item.first : item.end] = array("i", [9] * item.length)
            params = msgspec.structs.replace(request.params, seed=5000 + number)
            shown = {"prompt": pack_tokens(tokens), "params": params, "media": media}
            world.requests[number] = msgspec.structs.replace(request, **shown)
            world.media[params.seed] = media


def draw_media(seed: int, number: int, length: int) -> tuple[PlacedItem, ...]:
    """Images, clips without a span, and videos of two frames."""
    rng, names = random.Random(mixed(seed, 11)), random.Random(mixed(seed, number, 12))
    media, at = [], rng.randint(0, length // 2)
    while at < length:
        end = min(length, at + rng.randint(1, rng.choice((3, 8, 20))))
        spans = rng.choice([((at, end),), (), ((at, (at + end) // 2), ((at + end) // 2, end))])
        spans = tuple(span for span in spans if span[0] < span[1])
        digest, place = bytes([names.choice((1, 1, 1, 2))]) * 32, (number << 20) + at
        media.append(PlacedItem(at, end - at, digest, spans, "image", (end - at,), place))
        at = end + rng.randint(0, 6)
    return tuple(media)


def check_budget(scheduler: Scheduler, plan: StepPlan) -> None:
    """A step with chunks has at most its budget of rows, decode rows and their drafts among them; prompts may have a quarter. A
    span that is longer is a chunk of its own, and the only one; of what is encoded at once, all but one item are bounded."""
    encoded = sum(item.length for _, item in plan.encodes)
    assert len(plan.encodes) < 2 or encoded - plan.encodes[0].item.length <= scheduler.encoder_rows, plan
    if len(plan.chunks) == 1 and plan.spans == [plan.chunks[0][1:3]]:
        return
    budget, decodes = scheduler.config.prefill_budget, sum(width for _, width, _ in decode_rows(plan))
    prefill = plan.prompt_tokens
    assert prefill <= max(budget - decodes, budget // 4, 1), (prefill, decodes, budget)


def moved(media: tuple[PlacedItem, ...], number: int) -> tuple[PlacedItem, ...]:
    """The same media, sent by another request."""
    return tuple(msgspec.structs.replace(item, place=(number << 20) + item.first) for item in media)


def memory_of(media: tuple[PlacedItem, ...]) -> MediaEnd:
    """The memory that only this request has."""
    return MediaEnd(media[0].place, media[-1].place + media[-1].size)


def check_freed(machine: KVMachine, uses: MediaUses) -> None:
    """Once all is read, no media memory is left."""
    machine.read_media()
    machine.free_from(uses)
    left = {**uses._uses, **uses._ends}
    assert not left, f"media memory is left: {left}"
    assert not uses.unused
