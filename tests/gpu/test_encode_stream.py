"""Encoders on a stream of their own: the rows of the steps' stream, bit for bit, and steps that go on meanwhile."""

import time

import pytest
import torch
from torch import Tensor

from engine.media_memory import MediaReader
from engine.rank.batch import Chunk
from engine.rank.models.vision import Tower
from engine.rank.parallel import Single
from engine.rank.stages.encode_stage import EncodeStage
from tests.bench.encoders import encoder
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.media import MEMORY, plan_of
from tests.support.judge.pictures import Prompt, pictures

pytestmark = pytest.mark.gpu

SLEEP = 400_000_000  # cycles: about a fifth of a second


@pytest.mark.parametrize("fault", [False, True])
@torch.inference_mode()
def test_rows_are_waited_for(monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """A step's work ends while an encoder still runs; what needs its rows waits for them, and they are those of the steps' own
    stream; three times, each with another picture. Planted fault: without the wait others are read."""
    device = torch.device("cuda")
    model = encoder(SHAPES["e2b"], torch.bfloat16, device)
    shown = [Prompt([]).picture(picture, 9).media[0] for picture in pictures((4, 5), (4, 5), (4, 5))]
    stage = EncodeStage({"image": model}, device, Single(), 0, MediaReader(MEMORY.fd))
    stage.warm(graphs=True)
    alone = [model([picture.to(device)]) for picture in pictures((4, 5), (4, 5), (4, 5))]
    assert [(rows + 1).cpu().isfinite().all() for rows in alone]  # a kernel's first launch waits for all that run
    torch.cuda.synchronize()
    if fault:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    equal = []
    for number, (item, expected) in enumerate(zip(shown, alone, strict=True)):
        assert stage._stream is not None
        with torch.cuda.stream(stage._stream):
            torch.cuda._sleep(SLEEP)
        began = time.monotonic()
        stage.encode(plan_of(MEMORY.place([item]), [number]))
        assert [stage.advance() for _ in range(3)] == [True, True, False]  # its data; a piece; the next waits until that has ended
        (expected + 1).cpu()
        assert (time.monotonic() - began < 0.1, stage.ended) == (True, number), time.monotonic() - began
        soft = stage.soft_tokens([Chunk(number, 0, item.length, 0)])
        assert soft is not None
        equal.append(torch.equal(soft.values, expected))
        torch.cuda.synchronize()
        assert stage.ended == number + 1
    assert equal == [not fault] * 3


@pytest.mark.parametrize("member", ["e2b", "31b"])
@torch.inference_mode()
def test_captured_layers(member: str) -> None:
    """In fp32 batches of few pictures, at the edges of the captured sizes, have the rows of eager layers within 1e-5 of the largest
    value. Planted fault: pictures that begin where those before them did are a hundred times further off."""
    device = torch.device("cuda")
    model = encoder(SHAPES[member], torch.float32, device)
    assert isinstance(model, Tower)
    shown = (((4, 8),), ((3, 11),), ((1, 1), (4, 9), (2, 7)), ((16, 16),), ((12, 22), (12, 22)), ((2, 3),) * 4)
    batches = [[picture.to(device) for picture in pictures(*sizes)] for sizes in shown]
    right = [model(batch) for batch in batches]
    model.warm(graphs=True)
    assert error(model, batches, right) < 1e-5
    captured = model._captured
    assert captured is not None
    read = captured._rows  # by the graphs
    captured._rows = read._replace(starts=read.starts.clone())
    assert error(model, batches, right) > 1e-3
    captured._rows = read


def error(model: Tower, batches: list[list[Tensor]], right: list[Tensor]) -> float:
    """The largest of all batches."""
    return max(((model(batch) - rows).abs().max() / rows.abs().max()).item() for batch, rows in zip(batches, right, strict=True))
